"""Driver, torch's build, NCCL, deep_ep and NVSHMEM, InfiniBand."""

from collections.abc import Iterator

from moed.server.doctor.asked import Asked
from moed.server.doctor.finding import Finding, ok, problem, warning
from moed.server.doctor.libraries import Libraries
from moed.server.doctor.readings import Readings

# The oldest driver for what torch was built for, by the major version of CUDA.
LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
# deep_ep's ElasticBuffer was compiled against this version and asks for exactly it.
NCCL_OF_ELASTIC_BUFFER = "2.30.7"
PIN_DEEP_EP = "pip install --no-deps --require-hashes -r docker/cuda-requirements.txt"


def driver(seen: Readings, asked: Asked, libraries: Libraries | None) -> Iterator[Finding]:
    name = "driver"
    if seen.driver_version is None and not seen.num_gpu_devices:
        if asked.is_cuda:
            yield problem(
                name,
                "no NVIDIA driver is loaded, and no /dev/nvidia0",
                "install the driver on the host; in a container docker run --gpus all, or "
                "nvidia.com/gpu in limits; or serve with --device cpu",
            )
        else:
            yield ok(name, "none; this launch is for CPUs")
        return
    if asked.is_cuda and seen.num_gpu_devices < asked.num_ranks:
        yield problem(
            name,
            f"{seen.num_gpu_devices} GPU(s) for {asked.num_ranks} rank(s) of this node",
            "docker run --gpus all, or as many nvidia.com/gpu in limits; or ask for fewer ranks",
        )
        return
    version = seen.driver_version
    least = _least_driver(libraries)
    if version is not None and least is not None and int(version.split(".")[0]) < least:
        assert libraries is not None
        yield problem(
            name,
            f"{version}, and torch {libraries.torch} for CUDA {libraries.cuda} needs {least}",
            f"update the driver to {least} or newer on the host",
        )
        return
    yield ok(name, f"{version or 'version not told'}, {seen.num_gpu_devices} GPU(s)")


def _least_driver(libraries: Libraries | None) -> int | None:
    if libraries is None or libraries.cuda is None:
        return None
    return LEAST_DRIVER.get(int(libraries.cuda.split(".")[0]))


def torch_build(asked: Asked, libraries: Libraries | str) -> Iterator[Finding]:
    name = "torch"
    if isinstance(libraries, str):
        yield problem(name, libraries, "pip install --force-reinstall -c constraints.txt torch")
        return
    text = f"{libraries.torch}, for " + (
        "CPUs" if libraries.cuda is None else f"CUDA {libraries.cuda}"
    )
    if not asked.is_cuda:
        yield ok(name, text)
    elif libraries.cuda is None:
        yield problem(
            name,
            f"{text}: it knows no GPUs",
            "pip install --force-reinstall torch, of the same version without +cpu",
        )
    elif libraries.num_gpus < asked.num_ranks:
        why = libraries.gpu_fault or f"it can use {libraries.num_gpus}"
        yield problem(
            name,
            f"{text}, for {asked.num_ranks} rank(s): {why}",
            "look at nvidia-smi and CUDA_VISIBLE_DEVICES; in a container "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    else:
        yield ok(name, f"{text}, {libraries.num_gpus} GPU(s)")


def nccl(asked: Asked, libraries: Libraries | None) -> Iterator[Finding]:
    name = "NCCL"
    if libraries is None or libraries.nccl is None:
        if asked.is_cuda and asked.num_ranks * asked.num_nodes > 1 and libraries is not None:
            yield problem(name, "torch has none", "pip install --force-reinstall torch")
        else:
            yield ok(name, "none, and none is needed: gloo carries the exchange between CPUs")
    elif asked.backend == "deepep_v2" and libraries.nccl != NCCL_OF_ELASTIC_BUFFER:
        yield problem(
            name,
            f"{libraries.nccl}, and deep_ep's ElasticBuffer asks for {NCCL_OF_ELASTIC_BUFFER}",
            f"pip install --no-deps nvidia-nccl-cu13=={NCCL_OF_ELASTIC_BUFFER}",
        )
    else:
        yield ok(name, libraries.nccl)


def deep_ep(asked: Asked, libraries: Libraries | None) -> Iterator[Finding]:
    name = "deep_ep"
    reason = None if libraries is None else libraries.deep_ep
    if not asked.is_deep_ep:
        text = "not installed" if reason is None else reason or "loads"
        yield ok(name, f"{text}; not asked for (--all2all-backend {asked.backend})")
    elif reason is None:
        yield problem(
            name, f"not installed, and {asked.backend} needs it", f"{PIN_DEEP_EP}, or the image"
        )
    elif reason:
        yield problem(name, f"does not load: {reason}", fix_of_loading(reason))
    elif asked.backend == "deepep_v2" and libraries and not libraries.has_elastic_buffer:
        yield problem(name, "older than 2: it has no ElasticBuffer", PIN_DEEP_EP)
    else:
        yield ok(name, "loads, and with it NVSHMEM")


def fix_of_loading(reason: str) -> str:
    """What known reasons ask for."""
    known = {
        "libc10_cuda": "install a torch that is built for CUDA",
        "libtorch_cuda": "install a torch that is built for CUDA",
        "libnvshmem": "pip install --no-deps nvidia-nvshmem-cu13==3.4.5",
        "nccl": f"pip install --no-deps nvidia-nccl-cu13=={NCCL_OF_ELASTIC_BUFFER}, and keep other "
        "copies of libnccl off LD_LIBRARY_PATH",
        "libcudart": "install a torch that is built for CUDA 13",
        "CUDA_HOME": "set CUDA_HOME to a CUDA 13 toolkit with nvcc and cuobjdump",
        "nvcc": "set CUDA_HOME to a CUDA 13 toolkit with nvcc and cuobjdump",
        "undefined symbol": "install the deep_ep that was built for this torch",
    }
    matching = (fix for part, fix in known.items() if part.lower() in reason.lower())
    return next(matching, PIN_DEEP_EP)


def infiniband(seen: Readings, asked: Asked) -> Iterator[Finding]:
    name = "InfiniBand"
    active = [port for port in seen.infiniband if port.is_active]
    needs_it = asked.is_cuda and asked.num_nodes > 1
    if not needs_it:
        yield ok(name, f"{len(active)} active port(s); of use between nodes only")
        return
    if not seen.infiniband:
        severity = problem if asked.is_deep_ep else warning
        text = "DeepEP needs it" if asked.is_deep_ep else "the exchange goes over TCP, slowly"
        yield severity(
            name,
            f"no devices in /sys/class/infiniband: {text}",
            "install the drivers of the adapters (DOCA-OFED) on the host; without adapters take "
            "--all2all-backend all2allv",
        )
    elif not seen.has_verbs:
        yield problem(
            name,
            f"{len(seen.infiniband)} port(s), and no /dev/infiniband: nobody here can open them",
            "docker run --device /dev/infiniband --cap-add IPC_LOCK; in Kubernetes the resource of "
            "the RDMA device plugin",
        )
    elif not active:
        names = ", ".join(port.name for port in seen.infiniband)
        yield problem(
            name, f"no port is active: {names}", "ibstat; check cables and the subnet manager"
        )
    elif len(active) < len(seen.infiniband):
        down = ", ".join(port.name for port in seen.infiniband if not port.is_active)
        yield warning(
            name,
            f"{len(active)} of {len(seen.infiniband)} ports active; down: {down}",
            "ibstat; leave idle ones out with NCCL_IB_HCA and NVSHMEM_HCA_LIST",
        )
    else:
        yield ok(name, ", ".join(f"{port.name} ({port.link})" for port in active))
    if asked.is_deep_ep and seen.infiniband:
        yield from _gpu_direct(seen)


def _gpu_direct(seen: Readings) -> Iterator[Finding]:
    """IBGDA, with which GPUs ring the adapters' doorbells themselves."""
    name = "GPUDirect"
    if "PeerMappingOverride=1" not in seen.driver_parameters.replace("0x1", "1"):
        yield warning(
            name,
            "the driver does not let GPUs write to adapters (PeerMappingOverride)",
            "on the host: options nvidia NVreg_EnableStreamMemOPs=1 "
            'NVreg_RegistryDwords="PeerMappingOverride=1;" in /etc/modprobe.d, then reboot',
        )
    elif seen.modules and not seen.modules & {"nvidia_peermem", "nv_peer_mem"}:
        yield warning(name, "nvidia_peermem is not loaded", "modprobe nvidia_peermem, on the host")
    else:
        yield ok(name, "PeerMappingOverride is set")
