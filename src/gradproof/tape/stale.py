"""Did a backward read what its forward produced, or was that memory written since?"""

from __future__ import annotations

from gradproof.tape.operations import FunctionCall, Operation, Tape, references


def find_overwritten(
    tape: Tape, forward_end: int, backward: list[Operation]
) -> tuple[Operation, Operation] | None:
    """(write, read): memory that a backward reads and that was changed after its forward ended."""
    if not backward:
        return None
    own = {op.index for op in backward}
    writes: dict[int, Operation] = {}
    for operation in tape.operations[forward_end : backward[0].index]:
        for slot in operation.writes:
            writes[tape.slots[slot].storage] = operation
    for operation in backward:
        for slot in _only_read(operation):
            write = writes.get(tape.slots[slot].storage)
            made_by = tape.slots[slot].made_by
            gradient = made_by is not None and tape.operations[made_by].in_backward is not None
            made_before = made_by is None or made_by < forward_end or tape.operations[made_by].name == "alias"
            if write is not None and write.index not in own and made_before and not gradient:
                return write, operation
            if write is not None and made_by is not None and tape.operations[made_by].name == "alias":
                return write, operation
    return None


def find_recomputed_differently(
    tape: Tape, call: FunctionCall, backward: list[Operation]
) -> Operation | None:
    """An operation that a backward repeats from the forward, with another result."""
    prints = tape.fingerprints
    forward: dict[tuple, list[float]] = {}
    for operation in tape.operations[call.first : call.last]:
        if operation.fingerprint is not None and operation.makes:
            forward.setdefault(_signature(tape, operation), []).append(float(prints[operation.fingerprint]))
    for operation in backward:
        key = _signature(tape, operation)
        if operation.fingerprint is None or operation.name not in _REPEATED or key not in forward:
            continue
        now = float(prints[operation.fingerprint])
        if not any(abs(now - then) <= 1e-5 * (abs(now) + abs(then)) + 1e-12 for then in forward[key]):
            return operation
    return None


# what a backward contains only because it recomputes the forward
_REPEATED = {
    "tanh", "sigmoid", "erf", "_softmax", "_log_softmax", "relu", "gelu", "silu", "softplus", "sin", "cos",
    "rsqrt",
    "native_layer_norm", "native_batch_norm", "native_group_norm", "native_dropout", "bernoulli_", "elu",
    "leaky_relu",
}  # fmt: skip


def _signature(tape: Tape, operation: Operation) -> tuple:
    return operation.name, tuple(tape.slots[slot].shape for slot in operation.makes)


def find_foreign_activation(
    tape: Tape, call: FunctionCall, backward: list[Operation]
) -> tuple[Operation, str] | None:
    """A value a backward reads that neither its own forward read or made, nor the backward itself."""
    known = set(call.inputs) | {s for s in call.outputs if s is not None}
    for operation in tape.operations[call.first : call.last]:
        known.update((*operation.reads, *operation.makes))
    storages = {tape.slots[slot].storage for slot in known if tape.slots[slot].storage >= 0}
    for operation in backward:
        for slot in _only_read(operation):
            entry = tape.slots[slot]
            if entry.made_by is not None and tape.operations[entry.made_by].name == "alias":
                entry = tape.slots[tape.operations[entry.made_by].reads[0]]
            if entry.index in known or entry.storage in storages or entry.kind == "parameter":
                continue
            if entry.made_by is None and len(entry.shape) > 0 and entry.dtype.is_floating_point:
                return operation, f"{entry} was made before this step"
            if entry.made_by is not None and tape.operations[entry.made_by].in_backward is None:
                maker = tape.operations[entry.made_by]
                if maker.index > call.last or maker.index < call.first:
                    return operation, f"it was made by {maker.name} {tape.place(maker)}"
    return None


def backward_operations(tape: Tape, call: FunctionCall) -> list[Operation]:
    """The operations of the last backward of a call."""
    if not call.backwards:
        return []
    end, _, _, start = call.backwards[-1]
    name = f"{call.cls.__name__}Backward"
    return [op for op in tape.operations[start:end] if op.node == name and _belongs(tape, op, call)]


def _belongs(tape: Tape, operation: Operation, call: FunctionCall) -> bool:
    return operation.made_from is None or call.first <= operation.made_from < max(call.last, call.first + 1)


def _only_read(operation: Operation) -> list[int]:
    return [
        ref.slot for ref in references((operation.args, operation.kwargs)) if ref.slot not in operation.writes
    ]
