"""This machine's memory, and the share of one adapter: a sparse file has any size, and a key draws any matrix."""

import os

from scute.errors import Code, Refusal

GIB = 2**30
SHARE = 4


def machine_bytes() -> int:
    """This machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def most_bytes() -> int:
    """A quarter of it."""
    return machine_bytes() // SHARE


def check_size(what: str, num_bytes: int) -> None:
    """Refuse CAPACITY_HOST for what would take more, before any of it is read or made."""
    if num_bytes > most_bytes():
        raise Refusal(
            Code.CAPACITY_HOST,
            f"{what} would take {num_bytes / GIB:,.1f} GiB, and one may take a quarter of this machine's memory, "
            f"{most_bytes() / GIB:,.1f} GiB. Is it damaged? If not, serve it on a machine with more memory.",
        )
