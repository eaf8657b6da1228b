"""Vanilla ensembles: n networks with stacked parameters, called at once."""

import contextlib
import functools
import inspect
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils import _pytree as pytree

from . import _small_maps
from ._alike import check_alike
from ._attributes import Snapshot, copy_attributes, same_attributes
from ._autocast import autocast_dtype, mapped_autocast
from ._batched import batched_layers, run_batched
from ._gradients import is_eager, keep_small_blocks, unbind
from ._input import first_layer
from ._module import PlainKeys, copy_module, own_parameters
from ._outputs import dtypes, stack_outputs
from ._own_inputs import OwnInputs, tensors_of
from ._swap import call_with, places_of, tensors_in
from .simplex import check_member


class StackedEnsemble(PlainKeys):
    """n independent networks of one architecture, in one call.

    The parameters and buffers are those of the members, stacked: ``[n, *shape]`` under the
    members' names, leaves that an elementwise optimizer (SGD, AdamW) trains as each member's own
    would. Initialise them by :meth:`reset_parameters`: functions of torch.nn.init take a stack for
    one weight. The members given are not changed and not kept; what a member does to its input in
    place, no other sees. Random layers differ among the members; BatchNorm's
    statistics are each member's own. Activation checkpointing goes around the ensemble, not inside
    its members. Several threads may call an ensemble; while one is built, no other thread may call
    a model (torch.fx's tracing holds for the whole process).

    Args:
        models: at least one network; the same classes, shapes, flags and ties in all.
        strategy: ``"vmap"`` batches the members by torch.func.vmap, ``"loop"`` calls them one by
            one, ``"auto"`` takes what is fastest. On a CPU that is one batched product a layer for
            networks of linear and elementwise layers (nn.Linear and nn.Sequential of such), else
            the loop. Elsewhere it is vmap. Where vmap can't do the job (recurrent layers,
            data-dependent control flow, attributes that differ among the members, are plain
            tensors, or change in the forward pass, dtypes that autocast gives a member alone), it
            is the loop, with ``"vmap"`` after a warning that says why.

    Shape:
        - Input: ``[B, ...]`` shared by all members, or ``[n, B, ...]``, one batch a member. Pass
          ``shared=True`` or ``shared=False`` to say which. Without it, the first argument tells by
          the layer that it reaches first, through layers that keep its shape: it has one batch a
          member if its first dimension is n and its number of dimensions is one more than
          convolutions, pools, BatchNorm2d/3d, recurrent layers or attention take; before a
          flattening and a linear layer, if the size of an example is that of ``[n, B, ...]`` only;
          before a linear layer, if it has three dimensions (with a warning: a shared batch of n
          sequences looks the same). All else is shared: a flattening with B = 1, other layers,
          and code that changes the input before its first layer, or that torch.fx can't trace (it
          is tried once, at construction, on a copy without tensors).
        - Output: ``[n, B, ...]``

    Raises:
        TypeError: a call without the members' arguments.
        ValueError: no models, what is no module, lazy ones, or models that differ in class, shape,
            dtype, device, training mode or requires_grad; in the forward pass, no input, one
            without dimensions, a first dimension that is not n with ``shared=False``, or
            parameters on the meta device.

    >>> model = StackedEnsemble([nn.Linear(8, 2) for _ in range(5)])
    >>> model(torch.zeros(3, 8)).shape
    torch.Size([5, 3, 2])
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        *,
        strategy: Literal["auto", "loop", "vmap"] = "auto",
    ) -> None:
        one = isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList)
        if one or not isinstance(models, Iterable):
            raise ValueError(f"expected a list of models, got one {type(models).__name__}")
        models = list(models)
        if strategy not in ("auto", "loop", "vmap"):
            raise ValueError(f"expected strategy auto, loop or vmap, got strategy={strategy!r}")
        check_alike(models)
        first = models[0]
        stacked: dict[Tensor, Any] = {}
        for name, p in first.named_parameters():
            values = torch.stack([m.get_parameter(name).detach() for m in models])
            stacked[p] = nn.Parameter(values, requires_grad=p.requires_grad)
        for name, b in first.named_buffers():
            stacked[b] = torch.stack([m.get_buffer(name).detach() for m in models])
        super().__init__(copy_module(first, stacked))
        self.n = len(models)
        self.strategy = strategy
        # Members that differ in more than their tensors keep a skeleton each, without parameters.
        self._skeletons = [] if same_attributes(models) else [_skeleton(m) for m in models]
        self._why_loop = ""  # What vmap can't do here; empty while it may be able to.
        if recurrent := [m for m in first.modules() if isinstance(m, nn.RNNBase)]:
            self._why_loop = f"{type(recurrent[0]).__name__}, a recurrent layer"
        elif self._skeletons:
            self._why_loop = "attributes that differ among the members or are tensors"
        elif any(isinstance(m, _EMBEDDINGS) and m.sparse for m in first.modules()):
            self._why_loop = "sparse gradients"
        self._embeds = any(isinstance(m, _EMBEDDINGS) for m in first.modules())
        self._inputs = OwnInputs()
        self._told = False
        self._lock = _Lock()
        # The training modes and autocast dtypes in which it worked.
        self._vmap_tried: set[tuple[bool, torch.dtype | None]] = set()
        with _fork_rng(dict(first.named_parameters())):
            self._first_layer = first_layer(_skeleton(first))

    def forward(self, *args: Any, shared: bool | None = None, **kwargs: Any) -> Any:
        if shared is None:
            shared = self._is_shared(args, kwargs)
        outputs = self._batched(args, kwargs, shared)
        if outputs is not None:
            return outputs
        self._check_inputs(args, kwargs)
        use_vmap = self._use_vmap()
        in_dims = None  # The loop's, of a shared input.
        if use_vmap or not shared:
            in_dims = pytree.tree_map(lambda leaf: self._in_dim(leaf, shared), (args, kwargs))
        # They put members' tensors into ``module``: one thread at a time.
        with contextlib.nullcontext() if torch.compiler.is_compiling() else self._lock:
            outputs = (self._vmap if use_vmap else self._loop)(in_dims, args, kwargs)
        told = self._told or torch.compiler.is_compiling()
        if self.strategy == "vmap" and self._why_loop and not told:
            self._told = True
            warnings.warn(
                f"strategy='vmap' runs as a loop over the members: {self._why_loop}", stacklevel=4
            )
        return outputs

    def reset_parameters(self, members: Iterable[int] | None = None) -> None:
        """Initialise members (default: all) anew, each by its modules' own reset_parameters.

        Raises:
            ValueError: a module has parameters and no such method.
        """
        owners = [(name, m) for name, m in self.module.named_modules() if own_parameters(m)]
        # Children first, as in their construction: nn.MultiheadAttention draws over its children's.
        resets = {
            m: getattr(m, "reset_parameters", getattr(m, "_reset_parameters", None))
            for m in reversed(list(self.module.modules()))
        }
        missing = [f"{name} ({type(m).__name__})" for name, m in owners if resets[m] is None]
        if missing:
            raise ValueError(f"no reset_parameters in {', '.join(missing)}")
        for i in range(self.n) if members is None else members:
            with self._as_member(i):
                for reset in filter(None, resets.values()):
                    reset()

    def member(self, i: int) -> nn.Module:
        """Member i as a network of its own; see :func:`ensemblayers.member`."""
        i = check_member(i, self.n)
        own: dict[Tensor, Any] = {}
        for p in self.module.parameters():
            own[p] = nn.Parameter(p.detach()[i].clone(), requires_grad=p.requires_grad)
        for b in self.module.buffers():
            own[b] = b[i].clone()
        copied = copy_module(self.module, own)
        if self._skeletons:
            copy_attributes(self._skeletons[i], copied)
        for module in copied.modules():
            if isinstance(module, nn.RNNBase):
                module._init_flat_weights()
        return copied

    def skeleton_modules(self) -> list[nn.Module]:
        """The modules that run in place of ``module``'s where the members differ in attributes."""
        return [m for skeleton in self._skeletons for m in skeleton.modules()]

    def extra_repr(self) -> str:
        return f"n={self.n}, strategy={self.strategy!r}"

    def _check_inputs(self, args: Any, kwargs: Any) -> None:
        if not args and not kwargs:
            try:
                inspect.signature(self.module.forward).bind()
            except TypeError as error:
                raise TypeError(f"expected an input [B, ...] or [n, B, ...], {error}") from None
        inputs = tensors_of(args, kwargs)
        if inputs and all(x.dim() == 0 for x in inputs):
            raise ValueError("expected an input [B, ...] or [n, B, ...], got no dimensions, []")
        own = self._first_tensor()
        if own is not None and own.is_meta and not all(x.is_meta for x in inputs):
            raise ValueError(
                f"expected parameters with values for an input on {inputs[0].device}, got them on "
                "meta; call .to_empty(device=...), then reset_parameters() or load_state_dict()"
            )

    def _is_shared(self, args: Any, kwargs: Any) -> bool:
        first = self._first_layer
        if first is None:
            return True
        x = args[0] if args else kwargs.get(first.argument)
        if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[0] != self.n:
            return True
        own = first.takes_own_batches(x.shape)
        if own is None:
            warnings.warn(
                f"an input {list(x.shape)} is taken as one batch for each of the "
                f"n={self.n} members; pass shared=True or shared=False to say which",
                stacklevel=5,
            )
        return own is False

    def _in_dim(self, leaf: Any, shared: bool) -> int | None:
        if shared or not isinstance(leaf, Tensor) or leaf.dim() == 0:
            return None
        if leaf.shape[0] != self.n:
            raise ValueError(
                f"expected one batch for each of n={self.n} members, [n, B, ...], "
                f"got {list(leaf.shape)}"
            )
        return 0

    def _tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All parameters and buffers by name, as :func:`places_of` has them."""
        parameters, buffers = map(tensors_in, places_of(self.module))
        return parameters, buffers

    def _apply(self, fn, recurse=True):
        # A stack has a dimension too many for fn to give it a memory format.
        def flat(t: Tensor) -> Tensor:
            return fn(t.flatten(0, 1)).unflatten(0, t.shape[:2]) if t.dim() > 1 else fn(t)

        return super()._apply(flat, recurse)

    def _use_vmap(self) -> bool:
        if self._why_loop or self.strategy == "loop":
            return False
        first = self._first_tensor()
        return self.strategy == "vmap" or (first is not None and first.device.type != "cpu")

    def _first_tensor(self) -> Tensor | None:
        for kind in ("_parameters", "_buffers"):  # Faster than parameters() and buffers().
            for module in self.module.modules():
                for tensor in vars(module)[kind].values():
                    if tensor is not None:
                        return tensor
        return None

    def _batched(self, args: Any, kwargs: Any, shared: bool) -> Tensor | None:
        if self.strategy != "auto" or self._skeletons or len(args) != 1 or kwargs:
            return None
        if not isinstance(args[0], Tensor) or not args[0].is_cpu:
            return None
        x = args[0]
        if not shared:
            self._in_dim(x, shared)
        layers = batched_layers(self._modules["module"], x)  # Faster than the attribute.
        return None if layers is None else run_batched(layers, x, self.n, shared)

    def _loop(self, in_dims: Any, args: Any, kwargs: Any) -> Any:
        of_parameters, of_buffers = places_of(self.module)
        parameters, buffers = tensors_in(of_parameters), tensors_in(of_buffers)
        # One unbind, not n selects: the backward pass of a select fills all n members with zeros.
        unbound = {p: unbind(p) for p in parameters.values()}
        for p in self._written_weights():
            unbound[p] = tuple(p[i] for i in range(self.n))
        rows = {name: unbound[p] for name, p in parameters.items()}
        attributes = None if self._skeletons else Snapshot(self.module)
        eager = is_eager(*parameters.values(), *buffers.values())
        if eager:
            keep_small_blocks()
        direct = eager or torch.jit.is_tracing()  # Which functional_call does not take.
        places = None if self._skeletons or not direct else {**of_parameters, **of_buffers}
        convs = _small_maps.layers(self.module) if eager and torch.is_grad_enabled() else []
        memory = {k: [row.data_ptr() for row in own] for k, own in rows.items()} if eager else {}
        outputs = []
        for i in range(self.n):
            own = {name: row[i] for name, row in rows.items()}
            before = {name: b.select(0, i) for name, b in buffers.items()}
            own.update(before)
            call = functools.partial(call_with, self._caller(i), own, places, convs=convs)
            a, k = _of_member(i, in_dims, args, kwargs)
            outputs.append(self._inputs.call(("loop", self.training), call, a, k))
            for name, old in before.items():
                if own[name] is not old:  # The module assigned a new tensor to its buffer.
                    buffers[name][i].copy_(own[name])
            for name, starts in memory.items():
                if rows[name][i].data_ptr() != starts[i]:  # It assigned to its ``data``.
                    parameters[name].data[i] = rows[name][i].data
            if attributes is not None and attributes.changed():
                self._part(i, attributes)
                attributes = places = None
        return stack_outputs(outputs)

    def _written_weights(self) -> list[Tensor]:
        """The weights that layers scale in place, which rows of an unbind don't allow."""
        if not self._embeds:
            return []
        layers = (m for m in self.module.modules() if isinstance(m, _EMBEDDINGS))
        return [m.weight for m in layers if m.max_norm is not None]

    def _part(self, i: int, before: Snapshot) -> None:
        """Give each member its own attributes: the module's are now those of member i."""
        changes = before.changes()
        before.restore()
        self._skeletons = [_skeleton(self.module) for _ in range(self.n)]
        for module, (new, gone) in zip(self._skeletons[i].modules(), changes, strict=True):
            vars(module).update(new)
            for name in gone:
                del vars(module)[name]
        self._why_loop = self._why_loop or "an attribute was assigned"

    def _vmap(self, in_dims: Any, args: Any, kwargs: Any) -> Any:
        parameters, buffers = self._tensors()
        saved = {name: b.clone() for name, b in buffers.items()}
        attributes = Snapshot(self.module)

        first = self._first_tensor()
        device = "cpu" if first is None else first.device.type
        autocast = autocast_dtype(device)

        def call(parameters: dict, buffers: dict, args: Any, kwargs: Any) -> Any:
            own = {**parameters, **buffers}
            with mapped_autocast(device), _without_fast_path():
                out = call_with(self.module, own, None, args, kwargs)
            if any(own[name] is not b for name, b in buffers.items()):
                raise RuntimeError("a buffer was assigned, not updated in place")
            return out

        batched = vmap(call, in_dims=(0, 0, *in_dims), randomness="different")
        members = functools.partial(batched, parameters, buffers)
        kind = "vmap", self.training

        def restore() -> None:
            attributes.restore()
            with torch.no_grad():
                for name, b in buffers.items():
                    b.copy_(saved[name])

        def attempt() -> Any:
            out = self._inputs.call(kind, members, args, kwargs)
            if attributes.changed():
                raise RuntimeError("an attribute was assigned")
            return out

        def try_out() -> None:
            out = attempt()
            if autocast is None:
                return
            own = {name: t[0] for name, t in (*parameters.items(), *buffers.items())}
            a, k = _of_member(0, in_dims, args, kwargs)
            member = functools.partial(call_with, self.module, own, None)
            alone = self._inputs.call(kind, member, a, k)
            if (mapped := dtypes(out)) != (expected := dtypes(alone)):
                raise RuntimeError(f"autocast gives {mapped} where a member has {expected}")

        try:
            mode = self.training, autocast
            if mode not in self._vmap_tried and not torch.compiler.is_compiling():
                # A failed attempt must leave no trace in the graph or the generators: activation
                # checkpointing would not find it again.
                with torch.no_grad(), _fork_rng(parameters, buffers):
                    try_out()
                restore()
                self._vmap_tried.add(mode)
            return attempt()
        except (RuntimeError, TypeError, ValueError) as error:
            restore()
            reason = str(error)
        out = self._loop(in_dims, args, kwargs)
        self._why_loop = reason
        return out

    def _caller(self, i: int) -> nn.Module:
        if not self._skeletons:
            return self.module
        skeleton = self._skeletons[i]
        for own, leader in zip(skeleton.modules(), self.module.modules(), strict=True):
            own.training = leader.training
        return skeleton

    @contextlib.contextmanager
    def _as_member(self, i: int) -> Iterator[None]:
        """Let ``module`` hold member i's tensors, as views into the stacked ones."""
        saved = [(m, dict(m._parameters), dict(m._buffers)) for m in self.module.modules()]
        views: dict[Tensor, Any] = {}
        for p in self.module.parameters():
            views[p] = nn.Parameter(p.detach()[i], requires_grad=p.requires_grad)
        for b in self.module.buffers():
            views[b] = b[i]
        try:
            for m, own, buffers in saved:
                m._parameters.update((k, views[p]) for k, p in own.items() if p is not None)
                m._buffers.update((k, views[b]) for k, b in buffers.items() if b is not None)
            yield
        finally:
            for m, own, buffers in saved:
                m._parameters.update(own)
                m._buffers.update(buffers)

    def _complete(self, state_dict, prefix):
        # A plain network's tensors become every member's.
        own = self.module.state_dict(keep_vars=True)
        for name, tensor in own.items():
            plain = state_dict.get(prefix + name)
            if isinstance(plain, Tensor) and plain.dim() == tensor.dim() - 1:
                state_dict[prefix + name] = plain.expand(self.n, *plain.shape).clone()


_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


class _Lock:
    """A lock for the threads that call one ensemble; a copy has its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[type, tuple]:
        return _Lock, ()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    """No inference kernels in attention: mapped parameters look as if they needed no gradients."""
    if torch.compiler.is_compiling():
        yield
        return
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _of_member(i: int, in_dims: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A member's arguments: its own batch of what has one batch a member."""
    if in_dims is None:
        return args, kwargs
    flat, spec = pytree.tree_flatten((args, kwargs))
    dims = pytree.tree_leaves(in_dims, is_leaf=lambda x: x is None)
    own = [leaf if d is None else leaf[i] for leaf, d in zip(flat, dims, strict=True)]
    return pytree.tree_unflatten(own, spec)


def _fork_rng(*tensors: dict[str, Tensor]) -> contextlib.AbstractContextManager:
    devices = {t.device for d in tensors for t in d.values() if t.device.type == "cuda"}
    return torch.random.fork_rng(list(devices))


def _skeleton(model: nn.Module) -> nn.Module:
    """A copy of a model without storage for its parameters and buffers."""
    empty: dict[Tensor, Any] = {}
    for p in model.parameters():
        empty[p] = nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
    for b in model.buffers():
        empty[b] = b.to("meta")
    return copy_module(model, empty)
