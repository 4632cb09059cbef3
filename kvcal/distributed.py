"""Ranks: the processes that torchrun starts for one command, and all that they tell each other.

Every rank runs the same command from start to end. Only the items of a long loop (sequences, batches, plans) are dealt
out: ``in_turn`` has each measured by one rank and hands all results to every rank, in the order of the items. So a sum
is taken over the same numbers in the same order, however many ranks there are, and every rank goes on with the same
state. One process takes the same way, without a group.

Rank 0 is the one that a user sees. It alone prints, and its folder is the user's. The others work in folders of their
own (``own_folder``), which begin as copies of rank 0's and go with the command: nodes need not share a disk for
results, and no rank reads what another has half written.

Messages are JSON and tensors in safetensors' format, never pickled, through gloo: statistics are sums on the CPU. An
error of an item is a result, too: all ranks raise it. A rank that ends otherwise breaks its connections, which ends the
others; whoever comes first to the store prints (``speaks``). torchrun then ends what is left.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn, TypeVar

from kvcal.errors import ArtifactError, KvcalError, RankFailed, UsageError
from kvcal.lazy_torch import Tensor, torch

# The longest wait for another rank that is at work: an item may be a whole evaluation. A dead one is noticed at once.
TIMEOUT = timedelta(days=1)
# What libraries split their own work by, such as lm-eval and accelerate: here each rank works by itself.
ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
# Of a message sent at once.
PIECE_BYTES = 1 << 28
ERRORS = {kind.__name__: kind for kind in KvcalError.__subclasses__()}

Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class Parcel:
    """A message between ranks: a JSON value, and tensors on the CPU."""

    value: Any = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Ranks:
    """This process among ``size``. ``local``: its number among the ``on_node`` of its node; ``store``: of all;
    ``stack``: ends with the command."""

    rank: int
    size: int
    local: int
    on_node: int
    store: Any
    stack: ExitStack


_ranks: _Ranks | None = None
_is_speaker = True
_is_measuring = False  # an item, for itself: what that calls is not dealt out again


def rank() -> int:
    """The number of this process, 0 in one that is alone."""
    return 0 if _ranks is None else _ranks.rank


def size() -> int:
    """The number of processes."""
    return 1 if _ranks is None else _ranks.size


def size_on_node() -> int:
    """The number of processes on this node."""
    return 1 if _ranks is None else _ranks.on_node


def world_size() -> int:
    """The number of processes that torchrun has started, whether or not they have joined. UsageError: no number."""
    return _number("WORLD_SIZE", 1)


def speaks() -> bool:
    """Whether this process prints the error that ends the command: of several, the first that has one."""
    return _is_speaker


def device(name: str) -> str:
    """``name`` of a device; of several ranks each takes the GPU of its number on the node for "auto" and "cuda".

    Raises:
        UsageError: one GPU for all ranks, or fewer than there are ranks on this node.
    """
    if _ranks is None or name == "cpu" or not torch.cuda.is_available():
        return name
    if name not in ("auto", "cuda"):
        raise UsageError(f"--device {name}: every rank takes a GPU of its own", hint="leave --device out, or give cuda")
    local, count = _ranks.local, torch.cuda.device_count()
    if local >= count:
        raise UsageError(
            f"rank {rank()} is number {local} on its node, which has {count} GPUs",
            hint=f"give torchrun --nproc-per-node {count} or less, or --device cpu",
        )
    torch.cuda.set_device(local)
    return f"cuda:{local}"


@contextmanager
def joined() -> Iterator[None]:
    """The time of a command for all its ranks, as torchrun has started them; nothing without torchrun.

    Raises:
        UsageError: torchrun's environment is not whole, or the ranks do not reach each other.
    """
    global _ranks, _is_speaker
    if world_size() == 1:
        yield
        return
    import torch.distributed as dist

    with ExitStack() as stack:
        _ranks = ranks = _join(stack)
        try:
            yield
        except BaseException as error:
            # Connections last as long as the process: a rank that ends because they break is never the first.
            _is_speaker = _is_first_to_fail(ranks)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends by itself, with its own exit code
            if isinstance(error, _Ended):
                raise RankFailed(
                    "torchrun, or the system, has told this process to end (SIGTERM)",
                    hint="torchrun names a rank that was lost; what was finished is kept, the same command resumes",
                ) from None
            if isinstance(error, RankFailed):
                time.sleep(1.0)  # so that torchrun sees the other rank end first
            raise
        dist.destroy_process_group()


class _Ended(BaseException):
    """SIGTERM, as an exception that no stage catches."""


def _join(stack: ExitStack) -> _Ranks:
    import torch.distributed as dist

    number, count = _number("RANK", None), world_size()
    try:
        store, *_ = next(dist.rendezvous("env://", number, count, timeout=TIMEOUT))
        dist.init_process_group("gloo", store=store, rank=number, world_size=count, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"rank {number} of {count} does not reach the others: {' '.join(str(error).split())[:200]}",
            hint="start the command by torchrun; GLOO_SOCKET_IFNAME names the network interface, such as eth0",
        ) from None
    signal.signal(signal.SIGTERM, _end)
    local, on_node = _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", count)
    for name in ENVIRONMENT:
        os.environ.pop(name, None)
    if number > 0:
        stack.enter_context(redirect_stdout(StringIO()))
    return _Ranks(number, count, local, on_node, store, stack)


def _end(*_: object) -> NoReturn:
    """An exception, so that what was finished is kept."""
    raise _Ended


def _number(name: str, default: int | None) -> int:
    """A variable of torchrun's environment."""
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal() or (name == "WORLD_SIZE" and text == "0"):
        raise UsageError(f"{name} = {text!r} in the environment, expected a number", "start the command by torchrun")
    return int(text)


def _is_first_to_fail(ranks: _Ranks) -> bool:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    with suppress(RuntimeError):  # the store has gone with its owner
        return bool(ranks.store.add(f"kvcal/failed/{attempt}", 1) == 1)
    return False


@contextmanager
def undisturbed() -> Iterator[None]:
    """torchrun's signal to end waits until the context is left: a file is written whole within its grace."""
    if _ranks is None:
        yield
        return
    waiting: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: waiting.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
    if waiting:
        _end()


def in_turn(
    what: str, items: Sequence[Item], measure: Callable[[Item], Parcel], for_all: bool = True
) -> Iterator[Parcel]:
    """The parcel that ``measure`` makes of each item, in the items' order; ranks measure in turn. Each gets them all;
    unless ``for_all``, tensors are rank 0's alone.

    Raises:
        What ``measure`` raises, on every rank, after the parcels of the items before.
        RankFailed: another rank has ended.
        UsageError: ranks are at different places; ``what`` and the items' number tell them.
    """
    ranks = _ranks
    if ranks is None or _is_measuring:
        yield from map(measure, items)
        return
    for first in range(0, len(items), ranks.size):
        part = items[first : first + ranks.size]
        _require_same_place(f"{what}, {first} of {len(items)}")
        mine = _outcome(measure, part[ranks.rank]) if ranks.rank < len(part) else _NOTHING
        for owner in range(len(part)):
            yield _sent(mine, owner, for_all)


def from_first(what: str, make: Callable[[], Parcel]) -> Parcel:
    """The parcel that rank 0 makes, for all ranks. Raises as ``in_turn``."""
    if _ranks is None or _is_measuring:
        return make()
    _require_same_place(what)
    return _sent(_outcome(lambda _: make(), None) if _ranks.rank == 0 else _NOTHING, 0, True)


def own_folder(path: Path, *below: str) -> Path:
    """``path`` itself for rank 0; for another rank a folder with copies of the artifacts in it, which goes with the
    command. ``below``: the folders in it whose artifacts are read, too, such as "plans/*"."""
    if _ranks is None:
        return path
    found = from_first(f"the files of {path.name}", lambda: Parcel([str(name) for name in _kept(path, below)])).value
    mine = path
    if _ranks.rank > 0:
        mine = Path(_ranks.stack.enter_context(TemporaryDirectory(prefix=f"kvcal-rank{_ranks.rank}-")))
    for name in found:
        content = _broadcast((path / name).read_bytes() if _ranks.rank == 0 else b"", 0)
        if _ranks.rank > 0:
            (mine / name).parent.mkdir(parents=True, exist_ok=True)
            (mine / name).write_bytes(content)
    return mine


def same_file(path: Path) -> bool:
    """The file that each rank has made becomes rank 0's, since machines that are not alike may differ in last digits.
    Whether it has changed here."""
    if _ranks is None:
        return False
    mine = path.read_bytes()
    _require_same_place(f"the file {path.name}")
    content = _broadcast(mine, 0)
    if content == mine:
        return False
    path.write_bytes(content)
    return True


def _kept(folder: Path, below: Sequence[str]) -> list[Path]:
    """Artifacts and JSON files, relative to ``folder``."""
    from kvcal.artifact import read_inputs

    found: list[Path] = []
    for prefix in ("", *(f"{pattern}/" for pattern in below)):
        found += folder.glob(f"{prefix}*.json")
        for path in folder.glob(f"{prefix}*.safetensors"):
            with suppress(ArtifactError):  # a model's weights, or what its stage will refuse
                read_inputs(path)
                found.append(path)
    return sorted(path.relative_to(folder) for path in found if path.is_file())


_NOTHING = Parcel()


def _outcome(measure: Callable[[Item], Parcel], item: Item) -> Parcel:
    """The parcel or the error, as it is sent."""
    global _is_measuring
    _is_measuring = True
    try:
        parcel = measure(item)
    except RankFailed:
        raise
    except KvcalError as error:
        given = {name: getattr(error, name) for name in ("message", "hint", "smallest_bytes") if hasattr(error, name)}
        return Parcel({"error": type(error).__name__, "given": given, "place": error.place})
    finally:
        _is_measuring = False
    return Parcel({"value": parcel.value}, parcel.tensors)


def _sent(mine: Parcel, owner: int, for_all: bool) -> Parcel:
    """The outcome of the rank ``owner``. Raises the error that it is."""
    is_mine = owner == rank()
    about = json.loads(_broadcast(json.dumps(mine.value, allow_nan=False).encode() if is_mine else b"", owner))
    if "error" in about:
        error = ERRORS[about["error"]](**about["given"])
        raise error if about["place"] is None else error.at(about["place"])
    data = _to_bytes(mine.tensors) if is_mine and (for_all or owner > 0) else b""
    if for_all or (owner > 0 and rank() in (0, owner)):
        data = _moved(data, owner, for_all)
    if rank() and not for_all:
        return Parcel(about["value"])
    return Parcel(about["value"], mine.tensors if is_mine else _from_bytes(data))


def _to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """safetensors' format; b"" for none."""
    from safetensors.torch import save

    # Cloned: safetensors refuses tensors that share memory.
    cloned = {f"tensor.{name}": tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    return save(cloned) if cloned else b""


def _from_bytes(data: bytes) -> dict[str, Tensor]:
    from safetensors.torch import load

    return {name.removeprefix("tensor."): tensor for name, tensor in load(data).items()} if data else {}


def _require_same_place(what: str) -> None:
    import torch.distributed as dist

    mine = torch.frombuffer(bytearray(hashlib.sha256(what.encode()).digest()[:8]), dtype=torch.int64)
    every = [torch.empty_like(mine) for _ in range(size())]
    with _connected():
        dist.all_gather(every, mine)
    if any(int(other) != int(mine) for other in every):
        raise UsageError(
            f"the ranks are not at the same work: rank {rank()} is at {what}, others are elsewhere",
            hint="give all ranks the same command, versions, model and data",
        )


def _broadcast(data: bytes, owner: int) -> bytes:
    """``data`` of the rank ``owner``, to all."""
    return _moved(data, owner, True)


def _moved(data: bytes, owner: int, for_all: bool) -> bytes:
    """``data`` of the rank ``owner``, to all ranks, or to rank 0 alone, which is another."""
    import torch.distributed as dist

    def move(tensor: Tensor) -> None:
        if for_all:
            dist.broadcast(tensor, owner)
        elif rank() == owner:
            dist.send(tensor, 0)
        else:
            dist.recv(tensor, owner)

    is_mine, length = owner == rank(), torch.tensor([len(data)])
    with _connected():
        move(length)
        if not length:
            return b""
        buffer = torch.empty(int(length), dtype=torch.uint8)
        if is_mine:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for piece in buffer.split(PIECE_BYTES):
            move(piece)
    return data if is_mine else buffer.numpy().tobytes()


@contextmanager
def _connected() -> Iterator[None]:
    """gloo's errors as RankFailed."""
    try:
        yield
    except RuntimeError as error:
        reason = re.sub(r"^\[\S+\] ", "", " ".join(str(error).split())).partition(". ")[0]
        raise RankFailed(
            f"another of the {size()} ranks has ended, or cannot be reached: {reason[:200]}",
            hint="its own message tells why; what was finished is kept, the same command resumes",
        ) from None
