"""The notes that `isopref plan` prints with its figures: why nothing fits, what is assumed, and what is not counted."""

from collections.abc import Iterator

from isopref.build.run_plan import Hardware
from isopref.cards import GIB
from isopref.config.schema import Config
from isopref.models.shape import ModelShape
from isopref.ops import flash
from isopref.plan.attention import NAMES, is_measured
from isopref.plan.layout import Layout
from isopref.plan.memory import whole_bytes
from isopref.plan.scale import Forecast


def way_out(config: Config, layout: Layout, why_not: str) -> Iterator[str]:
    """Why no step fits, and what would."""
    yield why_not
    if layout.quantised:
        yield "a 4-bit model is replicated on every rank; without model.adapter.quantize, FSDP shards it"
    elif not layout.offload:
        yield "slower, but with less GPU memory: layout.offload=true"
    if config.model.adapter is None:
        yield "different math, but with much less memory: an adapter, as in model.adapter.rank=16"


def host_memory(hardware: Hardware, shape: ModelShape, layout: Layout, run: Forecast) -> Iterator[str]:
    """What the host's memory is needed for."""
    if layout.from_host:
        ranks = min(layout.ranks, hardware.network.ranks_per_node)
        size = ranks * whole_bytes(shape, layout) / GIB
        yield (
            f"while loading, the {ranks} ranks of a machine share one copy of the weights if the files have 16 bits; "
            f"otherwise, loading takes up to {size:,.0f} GiB of host memory"
        )
    if layout.offloaded:
        size = layout.offloaded * run.largest_tokens / layout.context * shape.width * layout.compute_bytes / GIB
        yield f"offloaded activations take {size:,.1f} GiB of host memory for each rank"


def kernels(hardware: Hardware, shape: ModelShape, layout: Layout) -> Iterator[str]:
    """What is assumed about the attention kernel."""
    if layout.rows not in ("shared", "packed") or layout.kernel == "segments" or not shape.heads:
        return
    could = flash.covers(hardware.card.capability) and flash.takes(shape.head_width, shape.value_width)
    if layout.kernel == "varlen_attn" and could:
        yield (
            f"attention: {NAMES['varlen_attn']} is assumed, because flash-attn-4 is not installed here or cannot be "
            "imported. With it, attention takes about 0.6 of the time: pip install 'isopref[flash]'"
        )
    if not is_measured(layout.kernel, shape.head_width):
        yield (
            f"attention: its speed was not measured for heads of width {shape.head_width}; that of another width is "
            "assumed"
        )


def left_out(config: Config, layout: Layout) -> Iterator[str]:
    """Figures that are rough, and what they leave out."""
    if layout.compute_bytes > 2:
        yield "speed in float32 is a rough estimate, without compiled layers. Faster: model.compute_dtype: bfloat16"
    elif not layout.compiled:
        yield "speed and activations are measured for compiled layers and packed rows; here they are an estimate"
    for name, size in (("tensor_parallel", layout.tensor), ("context_parallel", layout.context)):
        if size > 1:
            yield f"layout.{name}: the time of its communication is modelled from the links' rates, not measured"
    if layout.context > 1:
        yield "layout.context_parallel has not run on GPUs yet"
    if layout.offload:
        yield "layout.offload: the time does not include copies to the host and optimizer steps there"
    if layout.quantised:
        yield "model.adapter.quantize: the time does not include unpacking 4-bit weights"
    if config.optim.kind == "muon":
        yield "optim.kind: the time does not include muon's own products"
