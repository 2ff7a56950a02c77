"""Every model family of the tests, by name."""

from support.chat_templates import CLASSIC
from support.thinking_templates import THINKING

FAMILIES = CLASSIC | THINKING
