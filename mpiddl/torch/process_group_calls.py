"""The collectives of `torch.distributed` on an `mpiddl.Communicator`: checks at once, the work when its turn comes.

Tensors are not copied where they are contiguous; lists of tensors are, unless they lie one behind the other in memory. Each
call has torch's semantics; what all ranks must give alike is compared if TORCH_DISTRIBUTED_DEBUG is DETAIL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from mpiddl.errors import MismatchError, ShapeError, UsageError
from mpiddl.torch import process_group_reduce as reductions
from mpiddl.torch import process_group_sparse as sparse
from mpiddl.torch.process_group_tensors import Flat, check, check_list, neighbours_in_memory, one, store, words
from mpiddl.torch.process_group_work import Work

Tensors = list[torch.Tensor]


class Calls:
    """A mixin of `mpiddl.torch.process_group.MpiddlProcessGroup`, which has a communicator and a queue.

    Every call is collective over the group. Errors in arguments are raised by the call, on the ranks that gave them; what
    fails later is raised by ``wait`` of the returned `Work`.
    """

    _comm: Any
    _put: Callable[..., Work]
    _meet: Callable[[], None]

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        if sparse.is_sparse(tensors):
            sparse.check(tensors, _op(opts))
            tensor = tensors[0]
            return self._issue("allreduce", lambda: sparse.allreduce(self._comm, tensor), [tensor], opts, "sparse", tensor)
        tensor = one("tensor", tensors, reduced=True)
        op = reductions.reduction(_op(opts), tensor.dtype)

        def call() -> None:
            flat = Flat(tensor)
            reductions.allreduce(self._comm, flat, op)
            flat.put_back()

        return self._issue("allreduce", call, [tensor], opts, tensor, op.name)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        given = check("tensors", tensors, reduced=True)
        ops = {dtype: reductions.reduction(_op(opts), dtype) for dtype in dict.fromkeys(tensor.dtype for tensor in given)}

        def call() -> None:
            for dtype, op in ops.items():
                alike = [tensor for tensor in given if tensor.dtype == dtype]
                whole = Joined(alike)
                reductions.allreduce(self._comm, Flat(whole.data), op)
                whole.put_back()

        return self._issue("allreduce_coalesced", call, given, opts, *given)

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        tensor, root = one("tensor", tensors), self._root(opts)

        def call() -> None:
            flat = Flat(tensor)
            if tensor.numel():
                self._comm.Bcast(flat.words, root)
            flat.put_back()

        return self._issue("broadcast", call, [tensor], opts, tensor, root)

    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        tensor, root = one("tensor", tensors, reduced=True), self._root(opts)
        op = reductions.reduction(_op(opts), tensor.dtype)

        def call() -> None:
            flat = Flat(tensor)
            reductions.reduce(self._comm, flat, op, root)
            if root == self._comm.Get_rank():
                flat.put_back()

        return self._issue("reduce", call, [tensor], opts, tensor, op.name, root)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        self._whole("output", output, "input", input)
        return self._issue("all_gather_into_tensor", lambda: self._gather_all(output, input), [output], opts, input)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        pairs = list(zip(outputs, inputs, strict=True))
        for output, input in pairs:
            self._whole("output", output, "input", input)

        def call() -> None:
            for output, input in pairs:
                self._gather_all(output, input)

        return self._issue("allgather_into_tensor_coalesced", call, list(outputs), opts, *inputs)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        input, output = one("tensor", inputs), check("tensor_list", _only(outputs, "tensor_list"))
        rank = self._comm.Get_rank()
        check_list("tensor_list", output, self._comm.Get_size(), input, same_size=False)
        if output[rank].numel() != input.numel():
            raise ShapeError(f"tensor: got {input.numel()} elements, expected {output[rank].numel()} as in "
                             f"tensor_list[{rank}]")

        def call() -> None:
            whole, sizes = Joined(output, fill=False), [tensor.numel() for tensor in output]
            if len(set(sizes)) == 1:
                self._gather_all(whole.data, input)
            else:
                block = words(whole.data)
                self._comm.Allgatherv(Flat(input).words.copy(), [block, sizes])
            whole.put_back()

        alike = input if len({tensor.numel() for tensor in output}) == 1 else torch.Size([sum(map(torch.numel, output))])
        return self._issue("allgather", call, output, opts, alike)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        given = check("input_tensor_list", inputs)
        if len(outputs) != self._comm.Get_size():
            raise ShapeError(f"output_tensor_lists: got {len(outputs)} lists, expected {self._comm.Get_size()}, one for each "
                             "rank of the group")

        def call() -> None:
            for number, input in enumerate(given):
                whole = Joined([theirs[number] for theirs in outputs], fill=False)
                self._gather_all(whole.data, input)
                whole.put_back()

        return self._issue("allgather_coalesced", call, [tensor for theirs in outputs for tensor in theirs], opts, *given)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        input, root = one("tensor", inputs), self._root(opts)
        output: Tensors = []
        if root == self._comm.Get_rank():
            output = check("gather_list", _only(outputs, "gather_list"))
            check_list("gather_list", output, self._comm.Get_size(), input)

        def call() -> None:
            whole = Joined(output, fill=False) if output else None
            self._comm.Gather(Flat(input).words, words(whole.data) if whole else None, root)
            if whole:
                whole.put_back()

        return self._issue("gather", call, output, opts, input, root)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        at_root = self._root(opts) == self._comm.Get_rank()
        if at_root:
            self._whole("output", output, "input", input)
        parts = list(output.view(-1).split(max(1, input.numel()))) if at_root and input.numel() else []
        return self.gather([parts] if parts else [], [input], opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        output, root = one("tensor", outputs), self._root(opts)
        input: Tensors = []
        if root == self._comm.Get_rank():
            input = check("scatter_list", _only(inputs, "scatter_list"))
            check_list("scatter_list", input, self._comm.Get_size(), output)

        def call() -> None:
            flat = Flat(output, fill=False)
            self._comm.Scatter(words(Joined(input).data) if input else None, flat.words, root)
            flat.put_back()

        return self._issue("scatter", call, [output], opts, output, root)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        op = self._block("output", output, "input", input, opts)

        def call() -> None:
            self._scatter_sums(output, input, op)

        return self._issue("reduce_scatter_tensor", call, [output], opts, input, op.name)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        three = [(output, input, self._block("output", output, "input", input, opts))
                 for output, input in zip(outputs, inputs, strict=True)]

        def call() -> None:
            for output, input, op in three:
                self._scatter_sums(output, input, op)

        return self._issue("reduce_scatter_tensor_coalesced", call, list(outputs), opts, *inputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        output, input = one("output", outputs, reduced=True), check("input_list", _only(inputs, "input_list"))
        op = reductions.reduction(_op(opts), output.dtype)
        rank, sizes = self._comm.Get_rank(), [tensor.numel() for tensor in input]
        check_list("input_list", input, self._comm.Get_size(), output, same_size=False)
        if sizes[rank] != output.numel():
            raise ShapeError(f"output: got {output.numel()} elements, expected {sizes[rank]} as in input_list[{rank}]")

        def call() -> None:
            whole = Joined(input)
            if len(set(sizes)) == 1:
                self._scatter_sums(output, whole.data, op)
            else:
                total = whole.data.clone()
                reductions.allreduce(self._comm, Flat(total), op)
                store(output, total.split(sizes)[rank].view(output.shape))

        return self._issue("reduce_scatter", call, [output], opts, torch.Size(sizes), op.name)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        output, input, size = check("output_tensor_list", outputs), check("input_tensor_list", inputs), self._comm.Get_size()
        check_list("output_tensor_list", output, size, input[0] if input else torch.empty(0), same_size=False)
        check_list("input_tensor_list", input, size, output[0], same_size=False)

        def call() -> None:
            whole = Joined(output, fill=False)
            self._exchange(whole.data, [part.numel() for part in output], Joined(input).data, [part.numel() for part in input])
            whole.put_back()

        return self._issue("alltoall", call, output, opts)

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor, output_splits: Sequence[int],
                          input_splits: Sequence[int], opts: Any = None) -> Work:
        check("output", [output]), check("input", [input])
        if output.dtype != input.dtype:
            raise ShapeError(f"output: got {output.dtype}, expected {input.dtype} as in input")
        counts = [_counts(name, tensor, splits, self._comm.Get_size())
                  for name, tensor, splits in (("output", output, output_splits), ("input", input, input_splits))]

        def call() -> None:
            flat = Flat(output, fill=False)
            self._exchange(flat.data, counts[0], Flat(input).data, counts[1])
            flat.put_back()

        return self._issue("all_to_all_single", call, [output], opts)

    def barrier(self, opts: Any = None) -> Work:
        return self._issue("barrier", self._meet, [], opts)

    # What torch calls them in other versions
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    gather_into_tensor = gather_single
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _issue(self, name: str, call: Callable[[], None], tensors: Any, opts: Any, *alike: Any) -> Work:
        """Into the queue; ``alike`` is what all ranks must give alike."""
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:
            call = self._compared(name, call, [_print(each) for each in alike])
        return self._put(call, name, tensors, getattr(opts, "asyncOp", True))

    def _compared(self, name: str, call: Callable[[], None], own: list[str]) -> Callable[[], None]:
        """A collective that first compares the ranks' calls: one all-gather of some words."""

        def compare() -> None:
            told = self._comm.allgather((name, own))
            odd = [rank for rank, theirs in enumerate(told) if theirs != told[0]]
            if odd:
                first, other = (f"{its[0]}({', '.join(its[1])})" for its in (told[0], told[odd[0]]))
                raise MismatchError(f"{name}: got {other} on ranks {odd} of the group, expected {first} as on rank 0")
            call()

        return compare

    def _root(self, opts: Any) -> int:
        root, size = getattr(opts, "rootRank", 0), self._comm.Get_size()
        if not 0 <= root < size:
            raise UsageError(f"root: got {root}, expected a rank of the group, 0 to {size - 1}")
        if getattr(opts, "rootTensor", 0):
            raise UsageError(f"rootTensor: got {opts.rootTensor}, expected 0, because a rank has one device")
        return int(root)

    def _whole(self, name: str, output: torch.Tensor, of: str, input: torch.Tensor) -> None:
        """Check that ``output`` has room for the ``input`` of all ranks."""
        check(name, [output]), check(of, [input])
        size = self._comm.Get_size()
        if output.dtype != input.dtype or output.numel() != size * input.numel():
            raise ShapeError(f"{name}: got {output.numel()} elements of {output.dtype}, expected {size * input.numel()} of "
                             f"{input.dtype}: {size} times those of {of}")

    def _block(self, name: str, output: torch.Tensor, of: str, input: torch.Tensor, opts: Any) -> reductions.Reduction:
        self._whole(of, input, name, output)
        check(name, [output], reduced=True)
        return reductions.reduction(_op(opts), output.dtype)

    def _gather_all(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """All ranks' ``input``, one behind the other."""
        if not input.numel():
            return
        whole, block = Flat(output, fill=False), Flat(input).data
        own = whole.data[self._comm.Get_rank() * block.numel() :][: block.numel()]
        if own.data_ptr() == block.data_ptr():
            self._comm.Allgather(MPI.IN_PLACE, whole.words)
        else:
            self._comm.Allgather(words(_apart(block, whole.data)), whole.words)
        whole.put_back()

    def _scatter_sums(self, output: torch.Tensor, input: torch.Tensor, op: reductions.Reduction) -> None:
        flat, blocks = Flat(output, fill=False), Flat(input).data
        reductions.reduce_scatter(self._comm, _apart(blocks, flat.data), flat.data, op)
        flat.put_back()

    def _exchange(self, output: torch.Tensor, output_counts: list[int], input: torch.Tensor, input_counts: list[int]) -> None:
        sent, received = words(_apart(input, output)), words(output)
        self._comm.Alltoallv([sent, input_counts], [received, output_counts])


class Joined:
    """Tensors of one dtype as one flat one: their memory, where they lie one behind the other, else a copy and a way back."""

    def __init__(self, tensors: Tensors, fill: bool = True):
        self._tensors = tensors
        together = neighbours_in_memory(tensors)
        self._own = together is not None
        if together is not None:
            self.data = together
        elif fill:
            self.data = torch.cat([Flat(tensor).data for tensor in tensors])
        else:
            self.data = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype)

    def put_back(self) -> None:
        if not self._own:
            parts = self.data.split([tensor.numel() for tensor in self._tensors])
            for tensor, part in zip(self._tensors, parts, strict=True):
                store(tensor, part.view(tensor.shape))


def _op(opts: Any) -> Any:
    if opts is None:
        return dist.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)


def _only(lists: Any, name: str) -> Any:
    """The list of the one device that a rank has."""
    if len(lists) != 1:
        raise ShapeError(f"{name}: got {len(lists)} lists of tensors, expected one, because a rank has one device")
    return lists[0]


def _counts(name: str, tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Elements for each rank, from rows of the first dimension."""
    rows = tensor.shape[0] if tensor.dim() else 1
    row = tensor.numel() // rows if rows else 0
    if not splits:
        if rows % size:
            raise ShapeError(f"{name}: got {rows} rows, expected a multiple of {size}, the number of ranks, or split sizes")
        return [rows // size * row] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise ShapeError(f"{name}_split_sizes: got {list(splits)}, expected {size} numbers with the sum {rows}")
    return [split * row for split in splits]


def _apart(data: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``data``, or a copy if the other one overlaps it."""
    begin, end = (data.data_ptr() + edge * data.element_size() for edge in (0, data.numel()))
    first, last = (other.data_ptr() + edge * other.element_size() for edge in (0, other.numel()))
    return data.clone() if begin < last and first < end else data


def _print(alike: Any) -> str:
    if isinstance(alike, torch.Tensor):
        return f"{str(alike.dtype).removeprefix('torch.')}{list(alike.shape)}"
    return str(list(alike) if isinstance(alike, torch.Size) else alike)


