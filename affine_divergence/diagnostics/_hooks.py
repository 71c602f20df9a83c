# The hooks that show a capture what the layers of a model are given and return.
from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn

from affine_divergence.diagnostics._attention import Layout, Projections
from affine_divergence.diagnostics._layers import Layer, Site

if TYPE_CHECKING:
    from torch import Tensor

    from affine_divergence.diagnostics._capture import Capture


class _Hook:
    # Copies and pickles of a module carry its hooks along: they get one of the standard library, that does nothing and keeps nothing alive.
    def __init__(self, capture: Capture) -> None:
        self.capture = capture

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _NOTHING

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


_NOTHING = nullcontext().__exit__  # takes anything and returns None


class LayerHook(_Hook):
    def __init__(self, capture: Capture, site: Site) -> None:
        super().__init__(capture)
        self.site = site

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], z: Any) -> None:
        if module is not self.site.module or not self.capture.hears(module):
            return
        try:
            x = args[0] if args else kwargs[self.site.input]
            options = (*args[1:], *(value for name, value in kwargs.items() if name != self.site.input))
            self.capture.called([(self.site.layers[0], None)], x, options, z)
        except Exception as error:
            self.capture.fail(error, self.site.layers)


class Watch:
    """The projections of one attention module, while its forward runs."""

    def __init__(self, capture: Capture, site: Site) -> None:
        self.capture, self.site = capture, site
        self._projections: Projections | None = None
        self._layout: Layout | None = None
        self._batched = True

    def begin(self, query: Any) -> None:
        self.end()  # of a forward that was interrupted, after which no hook is called
        self._layout, self._batched = None, getattr(query, "ndim", 3) == 3
        self._projections = Projections(self._seen)
        self._projections.begin()

    def end(self) -> None:
        if self._projections is not None:
            self._projections.end()
            self._projections = None

    def _seen(self, x: Tensor, weight: Tensor, z: Tensor) -> None:
        try:
            if self._layout is None:  # the query comes first, as (token, batch, …)
                batch = x.shape[1] if self._batched or x.shape[1] != 1 else None
                self._layout = Layout(batch, self.site.module.batch_first)  # type: ignore[arg-type]
            parts = [(layer, columns) for layer in self.site.layers if (columns := _columns(layer, weight)) is not None]
            if parts:
                self.capture.called(parts, x, (), z, self._layout)
        except Exception as error:
            self.capture.fail(error, self.site.layers)


class _WatchHook(_Hook):
    def __init__(self, capture: Capture, watch: Watch) -> None:
        super().__init__(capture)
        self.watch = watch


class BeforeHook(_WatchHook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is self.watch.site.module and self.capture.hears(module):
            self.watch.begin(args[0] if args else kwargs.get("query"))


class AfterHook(_WatchHook):
    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        self.watch.end()


def _columns(layer: Layer, weight: Tensor) -> slice | None:
    """Where in the output of a map with this weight, some rows of a packed one maybe, the layer's own output lies."""
    assert layer.weight is not None
    if not layer.weight.held:
        return None
    whole = layer.weight.parameter
    if layer.weight.cut is None:
        return slice(None) if weight is whole else None
    if weight.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        return None
    first = (weight.storage_offset() - whole.storage_offset()) // whole.shape[1]
    start, stop = (row - first for row in layer.weight.cut)
    return slice(start, stop) if start >= 0 and stop <= weight.shape[0] else None
