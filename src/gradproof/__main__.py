"""`python -m gradproof` is the `gradproof` command."""

from gradproof.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
