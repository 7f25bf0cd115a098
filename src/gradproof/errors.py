"""The one exception whose message is all a person needs: the command line prints no traceback for it."""


class UserError(Exception):
    """What was asked for cannot be done: what, where, and what to do instead, in one or two sentences."""


EXIT_OWN_ERROR = 2  # gradproof could not do what was asked; a script's own exit code passes through unchanged
