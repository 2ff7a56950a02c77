"""Every shape that isopref reads. At most one fits a record, so their order does not matter.

To add one, write its class in a module of this package, and list it here.
"""

from isopref.data.known_shapes.labels import Label
from isopref.data.known_shapes.lists import Completions, Responses
from isopref.data.known_shapes.prompted import Alpaca, Messages, ShareGPT, Text
from isopref.data.known_shapes.shape import Shape
from isopref.data.known_shapes.whole import (
    AnthropicHH,
    CommonStart,
    Conversations,
    Templated,
    Transcript,
    UltraFeedback,
)

SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Text(),
        Alpaca(),
        Messages(),
        Conversations(),
        UltraFeedback(),
        ShareGPT(),
        AnthropicHH(),
        Transcript(),
        Templated(),
        CommonStart(),
        Responses(),
        Completions(),
        Label(),
    )
}
