"""Limits, memory, processors, clock: what any launch stands on."""

from collections.abc import Iterator

from moed.config.sizes import format_bytes
from moed.server.doctor.asked import Asked
from moed.server.doctor.finding import Finding, ok, problem, warning
from moed.server.doctor.readings import Readings

MIB, GIB = 2**20, 2**30
# NCCL's shared memory: some 10 MiB for each pair of ranks and channel; Docker gives 64 MiB.
LEAST_SHM_BYTES, ADVISED_SHM_BYTES = 128 * MIB, GIB
# One for each client, and some hundred of the processes' own.
LEAST_FILES, ADVISED_FILES = 1024, 8192
# Threads count too: some tens for each process.
THREADS_OF_A_PROCESS = 64
CLOCK_ERROR_S = 1.0


def shared_memory(seen: Readings, asked: Asked) -> Iterator[Finding]:
    name = "/dev/shm"
    more = (
        "docker run --shm-size 16g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory "
        "on /dev/shm"
    )
    size = seen.shm_bytes
    if size is None:
        yield problem(name, "missing, or this user cannot write to it", more)
        return
    text = format_bytes(size)
    if not asked.is_cuda or asked.num_ranks == 1:
        yield ok(name, f"{text}; hardly used by this launch")
    elif size < LEAST_SHM_BYTES:
        yield problem(name, f"{text}, and NCCL wants {format_bytes(ADVISED_SHM_BYTES)}", more)
    elif size < ADVISED_SHM_BYTES:
        yield warning(name, f"{text}, and NCCL may want {format_bytes(ADVISED_SHM_BYTES)}", more)
    else:
        yield ok(name, text)


def locked_memory(seen: Readings, asked: Asked) -> Iterator[Finding]:
    name = "memlock"
    if seen.memlock_bytes is None:
        yield ok(name, "unlimited")
        return
    text = format_bytes(seen.memlock_bytes)
    if asked.is_cuda and (asked.num_nodes > 1 or asked.is_deep_ep):
        yield problem(
            name,
            f"{text}, and RDMA pins whole buffers",
            "ulimit -l unlimited; docker run --ulimit memlock=-1; in a systemd unit "
            "LimitMEMLOCK=infinity; in Kubernetes in the container runtime's unit",
        )
    else:
        yield ok(name, f"{text}; matters with RDMA only")


def open_files(seen: Readings, asked: Asked) -> Iterator[Finding]:
    name, count = "nofile", seen.num_files
    if count is None or count >= ADVISED_FILES:
        yield ok(name, "unlimited" if count is None else str(count))
        return
    hard = seen.num_files_hard
    wanted = ADVISED_FILES if hard is None else min(ADVISED_FILES, max(hard, count))
    how = f"ulimit -n {wanted}" if wanted > count else "raise the hard limit"
    fix = f"{how}; docker run --ulimit nofile=65536; in a systemd unit LimitNOFILE=65536"
    found = f"{count} open files, one for each client and some hundred more"
    yield (problem if count < LEAST_FILES else warning)(name, found, fix)


def processes(seen: Readings, asked: Asked) -> Iterator[Finding]:
    name, count = "processes", seen.num_processes
    threads = max(THREADS_OF_A_PROCESS, (asked.num_threads or 0) * 2)
    needed = (asked.num_ranks + 2) * threads
    if count is not None and count < needed:
        yield problem(
            name,
            f"at most {count} processes and threads, and {asked.num_ranks} rank(s) with the front "
            f"end may have {needed}",
            f"ulimit -u {needed}; docker run --pids-limit -1; in Kubernetes podPidsLimit of the "
            "kubelet",
        )
    else:
        yield ok(name, "unlimited" if count is None else f"at most {count}, threads included")


def processors(seen: Readings, asked: Asked, num_cores: int) -> Iterator[Finding]:
    name = "processors"
    text = f"{num_cores} core(s) for {asked.num_ranks} rank(s) and the front end"
    threads = asked.num_threads or 1
    if num_cores < asked.num_ranks:
        yield warning(
            name,
            f"{text}: ranks take turns, and each waits for all others in every layer",
            f"give it {asked.num_ranks + 1} cores (docker run --cpus, limits.cpu in Kubernetes, "
            "taskset), or ask for fewer ranks",
        )
    elif asked.num_ranks * threads > num_cores:
        yield warning(
            name,
            f"{text}, each with {threads} threads",
            f"--num-threads {max(1, num_cores // asked.num_ranks)}, or leave it out",
        )
    elif seen.num_throttled:
        yield warning(
            name,
            f"{text}; the container's quota was used up in {seen.num_throttled} periods so far",
            "raise the quota (docker run --cpus, limits.cpu), or leave the limit out and keep the "
            "request",
        )
    else:
        yield ok(name, text)


def memory(asked: Asked, available_bytes: int | None) -> Iterator[Finding]:
    name = "memory"
    if available_bytes is None:
        yield warning(name, "not told by /proc/meminfo", "mount /proc")
        return
    text = f"{format_bytes(available_bytes)} free"
    if asked.is_cuda or asked.weight_bytes is None:
        yield ok(name, text)
        return
    text += f", and the ranks' weights take {format_bytes(asked.weight_bytes)}"
    if asked.weight_bytes > available_bytes:
        yield problem(
            name,
            text,
            "raise the container's limit (docker run --memory, limits.memory), or take a smaller "
            "--dtype or model",
        )
    else:
        yield ok(name, text)


def huge_pages(seen: Readings, asked: Asked) -> Iterator[Finding]:
    name = "huge pages"
    reserved = seen.reserved_hugepages_bytes
    if reserved > GIB:
        yield warning(
            name,
            f"{format_bytes(reserved)} are reserved (HugePages_Free), which moed cannot use",
            "sysctl -w vm.nr_hugepages=0, if nobody else needs them",
        )
    elif seen.transparent_hugepages == "never" and not asked.is_cuda:
        yield warning(
            name,
            "transparent ones are off: weights in memory are read more slowly",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root, on the host)",
        )
    else:
        yield ok(name, f"transparent: {seen.transparent_hugepages or 'not told'}; none reserved")


def clock(seen: Readings, asked: Asked) -> Iterator[Finding]:
    name, fix = "clock", "systemctl enable --now chrony (or systemd-timesyncd), on the host"
    if seen.clock is None:
        yield warning(name, "the kernel does not say whether it is synchronized", fix)
    elif not seen.clock.is_synchronized:
        yield warning(
            name, "not synchronized: logs, spans and metrics of several machines disagree", fix
        )
    elif seen.clock.max_error_s > CLOCK_ERROR_S:
        yield warning(name, f"may be wrong by {seen.clock.max_error_s:.1f} s", fix)
    else:
        yield ok(name, f"synchronized, to {seen.clock.max_error_s * 1e3:.0f} ms")
