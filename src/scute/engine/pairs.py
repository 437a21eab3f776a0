"""The shared pairs on the device: frozen factors that many adapters refer to (VeRA's projections)."""

import numpy as np
import torch

from scute.algebra.form import SharedPair
from scute.errors import Code, Refusal


class SharedPairs:
    """The resident pairs of shared factors, counted by the adapters that use them.

    a: [pairs, shared rank, max_in]; b: [pairs, shared rank, max_out]; rank: [pairs] int32, and the same on the host.
    The host keeps the factors too, as PEFT wrote them.
    """

    def __init__(
        self, pairs: int, rank: int, max_in: int, max_out: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.max_in, self.max_out = max_in, max_out
        self.a = torch.zeros(pairs, rank, max_in, dtype=dtype, device=device)
        self.b = torch.zeros(pairs, rank, max_out, dtype=dtype, device=device)
        self.rank = torch.zeros(pairs, dtype=torch.int32, device=device)
        self.host_rank = np.zeros(pairs, dtype=np.int32)
        self._held: list[SharedPair | None] = [None] * pairs
        self._users: list[set[int]] = [set() for _ in range(pairs)]

    def check_fits(self, pair: SharedPair) -> None:
        """Raises Refusal if the pair is larger than the places are."""
        limit = self.a.shape[1]
        if pair.rank > limit:
            raise Refusal(
                Code.CAPACITY_SHARED,
                f"VeRA rank {pair.rank} is greater than shared_rank {limit}; raise it in additional_config['scute'].",
            )
        if pair.a.shape[0] > self.max_in or pair.b.shape[1] > self.max_out:
            raise Refusal(
                Code.TENSOR_SHAPE,
                f"the VeRA projections are made for layers of {pair.a.shape[0]} inputs and {pair.b.shape[1]} outputs, "
                f"but this base model has at most {self.max_in} and {self.max_out}; was the adapter trained on it?",
            )

    def has_room_for(self, pair: SharedPair, adapter_id: int) -> bool:
        """Whether the pair is resident or has a place; what `adapter_id` holds alone counts as free."""
        return pair.key in self._keys() or any(users <= {adapter_id} for users in self._users)

    def acquire(self, pair: SharedPair, adapter_id: int) -> None:
        """Make the pair resident if it is not; the adapter holds its place until `release`."""
        if pair.key in self._keys():
            place = self.place_of(pair.key)
        else:
            place = next(i for i, users in enumerate(self._users) if not users)
            self._held[place] = pair
            self._copy(place, pair)
        self._users[place].add(adapter_id)

    def restore(self) -> None:
        """Copy all of them again: a sleep of level 2 discards the device's memory."""
        for place, pair in enumerate(self._held):
            if pair is not None:
                self._copy(place, pair)

    def place_of(self, key: str) -> int:
        """Place of a pair that some adapter holds."""
        return self._keys().index(key)

    def release(self, adapter_id: int) -> None:
        for users in self._users:
            users.discard(adapter_id)

    def _keys(self) -> list[str | None]:
        return [None if pair is None else pair.key for pair in self._held]

    def _copy(self, place: int, pair: SharedPair) -> None:
        self.a[place, : pair.rank, : pair.a.shape[0]].copy_(pair.a.T)
        self.b[place, : pair.rank, : pair.b.shape[1]].copy_(pair.b)
        self.rank[place : place + 1].copy_(torch.tensor([pair.rank], dtype=torch.int32))
        self.host_rank[place] = pair.rank
