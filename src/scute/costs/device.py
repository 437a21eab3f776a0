"""Three constants of a GPU, from measurements that are kept as JSON, and the time that bytes and launches take."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from scute.costs.traffic import Route, Traffic

PACKAGED = Path(__file__).parent / "devices"


class UnknownFigure(LookupError):
    """A prediction needs a figure of a device that nobody has measured."""


@dataclass(frozen=True, slots=True)
class Device:
    """name: as CUDA gives it. A figure that is None is not known.

    bandwidth_gb_s: beta, 10^9 bytes a second, read and written, of a copy far larger than L2. l2_bandwidth_gb_s: of
    one that L2 holds. launch_us: lambda, microseconds of one launch in a CUDA graph. capability: of CUDA, as "9.0".
    sources: figure to where it is from.
    """

    name: str
    bandwidth_gb_s: float | None = None
    l2_bandwidth_gb_s: float | None = None
    launch_us: float | None = None
    l2_mib: float | None = None
    memory_gib: float | None = None
    capability: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Self:
        """Raises ValueError for what is no description of a device."""
        known = {f.name for f in fields(cls)}
        numbers = known - {"name", "capability", "sources"}
        if not isinstance(data, Mapping) or not isinstance(data.get("name"), str) or data.keys() - known:
            raise ValueError(f"not the constants of a device; it may have {', '.join(sorted(known))}")
        capability, sources = data.get("capability", "0.0"), data.get("sources", {})
        if not isinstance(capability, str) or not re.fullmatch(r"\d+\.\d+", capability):
            raise ValueError(f'capability has to be two numbers, as "9.0", not {capability!r}')
        if not isinstance(sources, Mapping) or not all(isinstance(source, str) for source in sources.values()):
            raise ValueError(f"sources have to be sentences by figure, not {sources!r}")
        for key in numbers & data.keys():
            if (
                isinstance(data[key], bool)
                or not isinstance(data[key], int | float)
                or not 0 < data[key] < float("inf")
            ):
                raise ValueError(f"{key} has to be a positive number, not {data[key]!r}")
        return cls(**data)

    @property
    def fuses_gemm(self) -> bool:
        """Whether Scute runs the base GEMM of rotated slices in one launch there: where programs have 227 KiB."""
        return (self.capability or "0").partition(".")[0] in ("9", "10")

    @property
    def bytes_per_second(self) -> float:
        """Raises UnknownFigure."""
        return 1e9 * self._known("bandwidth_gb_s")

    @property
    def launch_seconds(self) -> float:
        """Raises UnknownFigure."""
        return 1e-6 * self._known("launch_us")

    def bandwidth(self, round_trip: int) -> float:
        """Bytes a second of a read and write of so many bytes together: L2's if it holds them. Raises UnknownFigure."""
        fits = self.l2_mib is not None and round_trip <= self.l2_mib * 2**20
        return 1e9 * self.l2_bandwidth_gb_s if fits and self.l2_bandwidth_gb_s else self.bytes_per_second

    def seconds(self, layer: Traffic) -> dict[str, float]:
        """Time that one layer adds, t - t0, by term: every route, and "launches". Raises UnknownFigure."""
        terms = {str(route): size / self.bytes_per_second for route, size in layer.bytes.items()}
        moved = layer.bytes.get(Route.ACTIVATIONS, 0)
        if moved:
            terms[str(Route.ACTIVATIONS)] = moved / self.bandwidth(moved)
        return terms | {"launches": layer.launches * self.launch_seconds}

    def _known(self, figure: str) -> float:
        value: float | None = getattr(self, figure)
        if value is None:
            raise UnknownFigure(f"{figure} of {self.name} is not known; run `scute calibrate` on it")
        return value


def user_folder() -> Path:
    """Where `scute calibrate` keeps what it measures, as the XDG specification has it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "scute" / "devices"


def file_of(folder: Path, name: str) -> Path:
    return folder / f"{_slug(name)}.json"


def known_devices() -> dict[str, Device]:
    """Every device by its name: the package's figures, and over them, one by one, those that the user measured.

    Raises ValueError that names the file for one that cannot be read.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in (*_files(PACKAGED), *_files(user_folder())):
        try:
            data = json.loads(path.read_text())
            Device.parse(data)
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error
        before = found.get(data["name"], {})
        sources = {**before.get("sources", {}), **data.get("sources", {})}
        found[data["name"]] = {**before, **data, "sources": sources}
    return {name: Device.parse(data) for name, data in found.items()}


def find_device(name: str) -> Device:
    """The device of that name, or the only one whose name has it in it, as "h200". Raises ValueError otherwise."""
    devices, wanted = known_devices(), _slug(name)
    exact = [d for d in devices.values() if _slug(d.name) == wanted]
    matches = exact or [d for d in devices.values() if wanted in _slug(d.name)]
    if len(matches) > 1:
        raise ValueError(f"{name!r} may be {' or '.join(d.name for d in matches)}; give more of the name")
    if not matches:
        known = ", ".join(devices)
        raise ValueError(
            f"no figures of a device {name!r} are known, but those of {known}; `scute calibrate` measures the one here"
        )
    return matches[0]


def _files(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("*.json"))


def _slug(name: str) -> str:
    return re.sub("[^a-z0-9]+", "_", name.lower()).strip("_")
