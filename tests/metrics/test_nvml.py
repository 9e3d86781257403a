"""GPU use by a made-up NVML; no GPU is needed."""

import itertools
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

from hybridflow.metrics import nvml
from hybridflow.metrics.nvml import GpuWatch, find_gpu, gpu_metrics, uuid_of


class FakeNvml(ModuleType):
    """Two GPUs, the second cut into two MIG slices, which have no utilisation, power or PCIe counter. Handles are UUIDs."""

    NVML_SUCCESS, NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 0, 1
    NVML_CLOCK_SM, nvmlClocksThrottleReasonSwPowerCap = 1, 4
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139

    class NVMLError(Exception):
        pass

    def __init__(self):
        super().__init__("pynvml")
        self.uuids = {0: ["GPU-aaaa"], 1: ["GPU-bbbb", "MIG-cccc", "MIG-dddd"]}
        self.links = {"GPU-aaaa": 1000}  # KiB so far, each way
        self.used, self.starts = [5 << 30, 7 << 30, 6 << 30], True
        self.reasons = itertools.cycle([0, 4 | 1, 0, 2])  # of every four readings one under the power limit

    def nvmlInit(self):
        if not self.starts:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self):
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, number):
        if number not in self.uuids:
            raise self.NVMLError("Invalid Argument")
        return self.uuids[number][0]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert any(uuid in known for known in self.uuids.values())
        return uuid

    def nvmlDeviceGetUUID(self, handle):
        return handle

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 7 if handle == "GPU-bbbb" else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, place):
        if place > 1:
            raise self.NVMLError("Not Found")
        return self.uuids[1][1 + place]

    def of_gpus_only(self, handle):
        if handle.startswith("MIG"):
            raise self.NVMLError("Not Supported")

    def nvmlDeviceGetUtilizationRates(self, handle):
        self.of_gpus_only(handle)
        return SimpleNamespace(gpu=80, memory=10)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=self.used.pop(0) if len(self.used) > 1 else self.used[0])

    def nvmlDeviceGetPowerUsage(self, handle):
        self.of_gpus_only(handle)
        return 350_000

    def nvmlDeviceGetClockInfo(self, handle, kind):
        self.of_gpus_only(handle)
        return {self.NVML_CLOCK_SM: 1410}[kind]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        self.of_gpus_only(handle)
        return next(self.reasons)

    def nvmlDeviceGetPcieThroughput(self, handle, way):
        self.of_gpus_only(handle)
        return (2000, 500)[way]

    def nvmlDeviceGetFieldValues(self, handle, fields):
        assert [scope for _, scope in fields] == [0xFFFFFFFF] * 2
        status = 0 if handle in self.links else 3
        return [SimpleNamespace(nvmlReturn=status, value=SimpleNamespace(ullVal=self.links.get(handle, 0))) for _ in fields]


@pytest.fixture
def fake(monkeypatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=10.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(nvml, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("visible", "number", "uuid"),
    [
        (None, 1, "GPU-bbbb"),
        ("1,0", 1, "GPU-aaaa"),
        ("1, 0", 0, "GPU-bbbb"),
        ("GPU-bbbb,GPU-a", 1, "GPU-aaaa"),  # the beginning of a UUID is enough for CUDA
        ("MIG-dddd", 0, "MIG-dddd"),
        ("0,MIG-c", 1, "MIG-cccc"),
    ],
)
def test_cudas_number_of_a_gpu_as_nvml_knows_it(fake, visible, number, uuid):
    assert uuid_of(fake, number, visible) == uuid


def test_a_gpu_that_cannot_be_watched_has_a_line_that_says_why(fake, monkeypatch):
    assert find_gpu("a", 1) == ("a", "GPU-bbbb", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-xyz")
    found = find_gpu("a", 0)
    assert found.gpu == "" and "CUDA_VISIBLE_DEVICES=GPU-xyz has GPU-xyz, NVML knows GPU-aaaa, GPU-bbbb, MIG-c" in found.lacks
    fake.starts = False
    assert "a: NVMLError: Driver Not Loaded" in find_gpu("a", 0).lacks
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as without the package
    assert "pip install nvidia-ml-py" in find_gpu("a", 0).lacks


def test_readings_add_up_until_they_are_taken(fake, clock):
    watch = GpuWatch(["GPU-aaaa"])
    watch.read()
    for _ in range(2):
        clock.now += 2
        fake.links["GPU-aaaa"] += 3000
        watch.read()
    (use,) = watch.take()
    assert use == pytest.approx(
        {
            "utilization": 0.8,
            "memory_bytes": 7 << 30,
            "power_watts": 350.0,
            "sm_clock_hz": 1.41e9,
            "power_capped": 1 / 3,
            "nvlink_bytes_per_second": 2 * 3000 * 1024 / 2,
            "pcie_bytes_per_second": 2_500_000,
        }
    )
    assert watch.take() == [{}]
    fake.links["GPU-aaaa"] = 0  # the driver was loaded anew
    watch.read()
    assert "nvlink_bytes_per_second" not in watch.take()[0]


def test_a_thread_reads_again_and_again(fake):
    third, look = threading.Event(), fake.nvmlDeviceGetPowerUsage
    readings = iter((False, False, True))
    fake.nvmlDeviceGetPowerUsage = lambda gpu: (next(readings, True) and third.set()) or look(gpu)
    watch = GpuWatch(["GPU-aaaa"], interval=0.001)
    watch.start()
    assert third.wait(30)
    watch.close()


def test_what_a_gpu_does_not_have_is_left_out(fake, clock):
    watch = GpuWatch(["MIG-dddd", "GPU-bbbb"])
    for _ in range(3):
        watch.read()
    slice_, gpu = watch.take()
    assert set(slice_) == {"memory_bytes"}
    assert set(gpu) == {"memory_bytes", "utilization", "power_watts", "sm_clock_hz", "power_capped", "pcie_bytes_per_second"}
    metrics = gpu_metrics([slice_, gpu])
    assert metrics["gpu/utilization_mean"] == pytest.approx(0.8) and "gpu/nvlink_bytes_per_second" not in metrics
    assert gpu_metrics([]) == gpu_metrics([{}]) == {}
