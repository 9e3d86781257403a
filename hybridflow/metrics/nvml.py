"""Use of the job's GPUs by NVML: one thread on each host reads all of them every few seconds.

Needs the package nvidia-ml-py (the extra `.[nvml]`). What a GPU does not have (NVLink, the utilisation of a MIG slice) is left
out, not 0. Imports no torch.
"""

import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

INTERVAL = 2.0  # seconds between two readings
ALL_LINKS = 0xFFFFFFFF  # NVML's scope of an NVLink counter that adds up a GPU's links
INSTALL = "GPU use is not in the metrics: pip install nvidia-ml-py adds utilisation, power, NVLink and PCIe traffic"

GpuUse = dict[str, float]  # of one GPU over a while: what it has of the keys of `SHOWN`

SHOWN = {
    "utilization": ("gpu/utilization_mean", statistics.fmean),  # 0 to 1: the time in which any kernel ran
    "memory_bytes": ("gpu/memory_bytes_max", max),  # of all processes
    "power_watts": ("gpu/power_watts_mean", statistics.fmean),
    "sm_clock_hz": ("gpu/sm_clock_hz_mean", statistics.fmean),
    "power_capped": ("gpu/power_capped", statistics.fmean),  # 0 to 1: readings at which the power limit held the clocks down
    "nvlink_bytes_per_second": ("gpu/nvlink_bytes_per_second", statistics.fmean),  # sent and received, as the next
    "pcie_bytes_per_second": ("gpu/pcie_bytes_per_second", statistics.fmean),
}


class Place(NamedTuple):
    """Where a rank is. `gpu`: the UUID of its GPU as NVML has it, empty without one; `lacks`: why a GPU cannot be watched."""

    host: str
    gpu: str = ""
    lacks: str = ""


def find_gpu(host: str, number: int) -> Place:
    """The GPU that CUDA has as `number` in this process."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return Place(host, lacks=INSTALL)
    try:
        pynvml.nvmlInit()
        return Place(host, gpu=uuid_of(pynvml, number, os.environ.get("CUDA_VISIBLE_DEVICES")))
    except (pynvml.NVMLError, LookupError) as error:
        return Place(host, lacks=f"GPU use is not in the metrics: {host}: {type(error).__name__}: {error}")


def uuid_of(nvml: ModuleType, number: int, visible: str | None) -> str:
    """The UUID of device `number` among those that CUDA_VISIBLE_DEVICES names: by index, or by UUID (its beginning
    is enough) of a GPU or a MIG slice. Indices are NVML's, in the order of the PCI bus; CUDA's are the same on a node of like
    GPUs, and under CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Raises:
        LookupError: it names no such GPU.
    """
    entry = str(number) if visible is None else [part.strip() for part in visible.split(",")][number]
    if entry.isdigit():
        return nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(int(entry)))
    known = [uuid for gpu in range(nvml.nvmlDeviceGetCount()) for uuid in _uuids(nvml, gpu)]
    for uuid in known:
        if uuid.startswith(entry):
            return uuid
    raise LookupError(f"CUDA_VISIBLE_DEVICES={visible} has {entry}, NVML knows {', '.join(known)}")


def _uuids(nvml: ModuleType, number: int) -> list[str]:
    """Of a GPU and its MIG slices."""
    gpu = nvml.nvmlDeviceGetHandleByIndex(number)
    found = [nvml.nvmlDeviceGetUUID(gpu)]
    try:
        for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
            found.append(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, place)))
    except nvml.NVMLError:  # no MIG, or no more slices
        pass
    return found


def watchers(places: Sequence[Place]) -> dict[int, list[str]]:
    """Who watches which GPUs: the lowest rank of each host all that the job has there. `places`: of every rank."""
    first: dict[str, int] = {}
    found: dict[int, list[str]] = defaultdict(list)
    for rank, place in enumerate(places):
        own = found[first.setdefault(place.host, rank)]
        if place.gpu and place.gpu not in own:
            own.append(place.gpu)
    return {rank: gpus for rank, gpus in found.items() if gpus}


class GpuWatch:
    """Reads GPUs: once started, in a thread of its own until closed."""

    def __init__(self, uuids: Sequence[str], interval: float = INTERVAL):
        import pynvml

        self._gpus = [_Gpu(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)) for uuid in uuids]
        self._interval, self._lock, self._closed = interval, threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="NVML", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def read(self) -> None:
        with self._lock:
            for gpu in self._gpus:
                gpu.read()

    def take(self) -> list[GpuUse]:
        """Of every GPU since the last call; empty where none was read since."""
        with self._lock:
            return [gpu.take() for gpu in self._gpus]

    def _watch(self) -> None:
        self.read()
        while not self._closed.wait(self._interval):
            self.read()


class _Gpu:
    def __init__(self, nvml: ModuleType, handle: Any):
        self._nvml, self._handle = nvml, handle
        self._readings: dict[str, list[float]] = defaultdict(list)
        self._links: tuple[float, int] | None = None  # the last reading: when, and the bytes so far

    def read(self) -> None:
        for name, look in (
            ("utilization", self._utilization),
            ("memory_bytes", self._memory),
            ("power_watts", self._power),
            ("sm_clock_hz", self._clock),
            ("power_capped", self._capped),
            ("nvlink_bytes_per_second", self._nvlink),
            ("pcie_bytes_per_second", self._pcie),
        ):
            try:
                value = look()
            except self._nvml.NVMLError:  # not supported by this GPU, this slice of one, or this driver
                continue
            if value is not None:
                self._readings[name].append(value)

    def take(self) -> GpuUse:
        readings, self._readings = self._readings, defaultdict(list)
        return {name: SHOWN[name][1](values) for name, values in readings.items()}

    def _utilization(self) -> float:
        return self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100

    def _memory(self) -> float:
        return self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used

    def _power(self) -> float:
        return self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000  # from milliwatts

    def _clock(self) -> float:
        return 1e6 * self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)

    def _capped(self) -> float:
        reasons = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        return float(bool(reasons & self._nvml.nvmlClocksThrottleReasonSwPowerCap))

    def _pcie(self) -> float:
        """NVML counts for 20 ms each way, in KB/s."""
        ways = (self._nvml.NVML_PCIE_UTIL_TX_BYTES, self._nvml.NVML_PCIE_UTIL_RX_BYTES)
        return 1000 * sum(self._nvml.nvmlDeviceGetPcieThroughput(self._handle, way) for way in ways)

    def _nvlink(self) -> float | None:
        """From counters in KiB, between this reading and the last; None at the first, and without NVLink."""
        ways = (self._nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, self._nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
        fields = self._nvml.nvmlDeviceGetFieldValues(self._handle, [(way, ALL_LINKS) for way in ways])
        if any(field.nvmlReturn != self._nvml.NVML_SUCCESS for field in fields):
            return None
        last, self._links = self._links, (time.monotonic(), 1024 * sum(field.value.ullVal for field in fields))
        if last is None or self._links[1] < last[1]:  # the counters began anew
            return None
        return (self._links[1] - last[1]) / (self._links[0] - last[0])


def gpu_metrics(uses: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """gpu/* of a step from what its GPUs have: means over them, of the memory the most."""
    found = {name: [use[name] for use in uses if name in use] for name in SHOWN}
    return {metric: how(found[name]) for name, (metric, how) in SHOWN.items() if found[name]}
