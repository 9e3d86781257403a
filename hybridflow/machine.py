"""What this machine is made of, and whether a job can live on it: GPUs, their links, shared memory, limits, ports, disk.

`look` collects the facts, `judge` is pure. Imports no torch.
"""

import os
import resource
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
SHARED_MEMORY_PER_RANK = 64 << 20  # NCCL's and vLLM's buffers between the ranks of a node
FILES_PER_RANK = 1024  # gloo alone keeps a socket to every peer of every group


@dataclass(frozen=True)
class Machine:
    """Attributes:
    gpus: their names, as nvidia-smi lists them.
    driver: its version; empty without GPUs.
    links: between GPUs, each pair's kind as `nvidia-smi topo -m` has it (NV18, PIX, SYS, ...), sorted, without repetition.
    shared_memory: free bytes of /dev/shm. memory: of the host, bytes. cores: that this process may use.
    open_files: soft and hard limit. processes: the soft limit.
    port: an error from listening where the nodes would meet, or empty.
    own_address: what the machine's name stands for; empty where for nothing.
    folder, folder_free: the run's folder (or the one above it that exists), and its free bytes; -1: it cannot be written to.
    """

    gpus: tuple[str, ...]
    driver: str
    links: tuple[str, ...]
    shared_memory: int
    memory: int
    cores: int
    open_files: tuple[int, int]
    processes: int
    port: str
    own_address: str
    folder: str
    folder_free: int


def look(run_dir: Path, port: int = 0) -> Machine:
    """`port`: where the nodes would meet, to be tried here; 0: any free one."""
    folder = run_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    names = nvidia_smi("--query-gpu=name", "--format=csv,noheader")
    return Machine(
        gpus=tuple(names),
        driver=driver(),
        links=links(nvidia_smi("topo", "-m")) if len(names) > 1 else (),
        shared_memory=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        cores=len(os.sched_getaffinity(0)),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        processes=resource.getrlimit(resource.RLIMIT_NPROC)[0],
        port=try_port(port),
        own_address=_own_address(),
        folder=str(folder),
        folder_free=shutil.disk_usage(folder).free if _writable(folder) else -1,
    )


def rows(machine: Machine) -> list[tuple[str, str]]:
    """The facts as they are shown: name and value."""
    counts = {name: machine.gpus.count(name) for name in machine.gpus}
    soft, hard = (_limit(value) for value in machine.open_files)
    folder = f"{machine.folder_free / 1e9:.1f} GB free" if machine.folder_free >= 0 else "cannot be written"
    return [
        ("GPUs", ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none seen by nvidia-smi"),
        *([("links between GPUs", ", ".join(machine.links))] if machine.links else []),
        ("CPU cores, memory", f"{machine.cores}, {machine.memory / GIB:.0f} GiB"),
        ("shared memory", f"{machine.shared_memory / GIB:.1f} GiB free"),
        ("open files", f"{soft} (at most {hard})"),
        ("processes", _limit(machine.processes)),
        ("own address", machine.own_address or "none"),
        ("port to meet", machine.port or "free"),
        ("run folder", f"{folder} ({machine.folder})"),
    ]


def judge(machine: Machine, ranks: int, nodes: int) -> tuple[list[str], list[str]]:
    """Problems, which will end or forbid a job of `ranks` on this node, and warnings; each with what mends it."""
    problems, warnings = [], []
    needed = ranks * SHARED_MEMORY_PER_RANK
    if machine.shared_memory < needed:
        problems.append(
            f"/dev/shm has {machine.shared_memory >> 20} MiB free, {ranks} ranks need about {needed >> 20}: mount -o"
            " remount,size=16G /dev/shm, or docker run --shm-size=16g (or --ipc=host)"
        )
    soft, hard = machine.open_files
    files = FILES_PER_RANK
    if soft != resource.RLIM_INFINITY and soft < files:
        raisable = hard == resource.RLIM_INFINITY or hard >= files
        how = "ulimit -n 65536" if raisable else "have the administrator raise nofile in limits.conf (Slurm: LimitNOFILE)"
        problems.append(f"a process may open {soft} files, a rank needs up to {files}: {how}")
    if machine.port:
        problems.append(f"{machine.port}: another job may be there; take another MASTER_PORT")
    if machine.folder_free < 0:
        problems.append(f"the run's folder cannot be written: {machine.folder}: choose another run.dir")
    elif machine.folder_free < GIB:
        warnings.append(f"only {machine.folder_free >> 20} MiB are free in {machine.folder}: weights may not fit")
    if nodes > 1 and machine.own_address.startswith("127."):
        warnings.append(
            f"this machine's name stands for {machine.own_address}, which other nodes cannot reach: hybridflow names the"
            " interface to gloo by itself; others may need GLOO_SOCKET_IFNAME, or another line in /etc/hosts"
        )
    if any(link in ("SYS", "NODE") for link in machine.links):
        warnings.append(
            "some GPUs reach each other only through the CPU: keep tp within those joined by NVLink or PCIe switches"
        )
    if machine.gpus and ranks > len(machine.gpus):
        problems.append(f"{ranks} ranks, but {len(machine.gpus)} GPUs: lower cluster.ranks_per_node")
    return problems, warnings


def driver() -> str:
    """The version of NVIDIA's driver; empty without GPUs."""
    return next(iter(nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")), "")


def nvidia_smi(*arguments: str) -> list[str]:
    """Its output by lines; none where there is no NVIDIA driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines() if done.returncode == 0 else []


def links(topology: list[str]) -> tuple[str, ...]:
    """The kinds of links in the matrix of `nvidia-smi topo -m`: the columns of the GPUs in their rows."""
    table = [line.replace("\x1b[4m", "").replace("\x1b[0m", "").split() for line in topology]
    header = next((words for words in table if words[:1] == ["GPU0"]), [])
    count = sum(word.startswith("GPU") and word[3:].isdigit() for word in header)
    found = {
        word for words in table if words is not header and words and words[0].startswith("GPU") for word in words[1 : count + 1]
    }
    return tuple(sorted(found - {"X"}))


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def try_port(port: int) -> str:
    """Why nobody can listen at the port of this machine; empty where one can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port whose last user has just left is free
        try:
            probe.bind(("", port))
        except OSError as error:
            return f"port {port} cannot be listened at ({error.strerror})"
    return ""


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _writable(folder: Path) -> bool:
    """By writing: permission bits do not tell for root, quotas or read-only mounts."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
            file.flush()
    except OSError:
        return False
    return True
