"""A version of which slices come is written, element by element, where the whole tensors would have been."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from weightlane.rollout.layout.map.geometry import simplified_copy
from weightlane.rollout.layout.map.layout_map import LayoutMap, SourceSpec, TargetSpec
from weightlane.rollout.layout.map.sliced_layout import sliced_layout
from weightlane.sync import TensorSlice, TensorSpec
from weightlane.sync.version.box import Box

WHOLE = "w"


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of its own element numbers, and a view of it such as loaders make: narrowed, transposed, taken apart."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3)))
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    view = tensor
    for _ in range(draw(st.integers(0, 3))):
        axis = draw(st.integers(0, view.dim() - 1))
        how = draw(st.sampled_from(["narrow", "transpose", "apart", "step"]))
        if how == "narrow":
            start = draw(st.integers(0, view.shape[axis] - 1))
            view = view.narrow(axis, start, draw(st.integers(1, view.shape[axis] - start)))
        elif how == "transpose":
            view = view.transpose(axis, draw(st.integers(0, view.dim() - 1)))
        elif how == "apart" and view.shape[axis] % 2 == 0:
            view = view.unflatten(axis, (view.shape[axis] // 2, 2))
        elif how == "step":
            view = view[(slice(None),) * axis + (slice(None, None, 2),)]
    return tensor, view


def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A tensor cut into boxes."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 4))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[axis]))
        for first, length in ((0, at), (at, box.shape[axis] - at)):
            if length:
                starts = (*box.starts[:axis], box.starts[axis] + first, *box.starts[axis + 1 :])
                boxes.append(Box(starts, (*box.shape[:axis], length, *box.shape[axis + 1 :])))
    return boxes


def written(layout: LayoutMap, sources: dict[str, torch.Tensor], numel: int) -> torch.Tensor:
    """The target after every copy; -1 where nothing is written."""
    target = torch.full((numel,), -1)
    for copy in layout.copies:
        come = sources[copy.source].contiguous().clone()
        value = come.as_strided(copy.shape, copy.source_strides, copy.source_offset)
        target.as_strided(copy.shape, copy.target_strides, copy.target_offset).copy_(value)
    return target


@given(st.data())
def test_slices_are_written_where_the_whole_tensor_would_be(data: st.DataObject) -> None:
    tensor, view = data.draw(views())
    shape, numel = tuple(tensor.shape), view.numel()
    dense = torch.empty(view.shape).stride()
    dimensions = zip(view.shape, view.stride(), dense, strict=True)
    spec = SourceSpec(shape, torch.int64)
    target = TargetSpec((numel,), (1,), 0, torch.int64)
    piece = simplified_copy(WHOLE, int(view.storage_offset()), "t", 0, dimensions)
    layout = LayoutMap({WHOLE: spec}, {"t": target}, [piece])
    boxes = boxes_of(data.draw, shape)
    regions = {
        f"cell {number}": TensorSlice(TensorSpec(WHOLE, shape, torch.int64), box) for number, box in enumerate(boxes)
    }

    sliced = sliced_layout(layout, regions)

    sources = {name: tensor[region.box.index] for name, region in regions.items()} | {WHOLE: tensor}
    assert torch.equal(written(sliced, sources, numel), view.reshape(-1))
    assert sum(copy.numel for copy in sliced.copies) == numel, "an element is written twice"
    whole = WHOLE in sliced.sources
    assert whole or sliced.sources.keys() == regions.keys()
