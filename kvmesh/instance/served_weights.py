"""Which weights an instance computes with, and the check that a request was made for them: with other weights its block
keys would name other KV."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.errors import ModelNotFound


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """Identifies the weights of an instance. `epoch` is the number that an operator gave them, 0 without one."""

    fingerprint: str
    epoch: int = 0

    def check(self, fingerprint: str, epoch: int) -> None:
        """Raises ModelNotFound, naming field and value, for a request that was made for other weights."""
        if fingerprint != self.fingerprint:
            text = f"model_fingerprint={fingerprint[:12]!r}: this instance serves {self.fingerprint[:12]!r}"
            raise ModelNotFound(text, field="model_fingerprint")
        if epoch != self.epoch:
            text = f"weights_epoch={epoch}: this instance serves epoch {self.epoch} of {fingerprint[:12]!r}"
            raise ModelNotFound(text, field="weights_epoch")
