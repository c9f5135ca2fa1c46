"""Number formats of weights and KV, with what a number of each takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from simkv.core.errors import InputError, spelling_hint

FormatName = Literal["bf16", "fp8", "fp8_block", "nvfp4", "mxfp4", "int4", "int4_g32"]
KvFormatName = Literal["bf16", "fp8", "nvfp4"]


@dataclass(frozen=True)
class NumberFormat:
    """A number format: ``bytes`` of a weight with its share of the scales.

    ``bits`` are those of the number itself, and ``activations`` of what it is multiplied with on
    tensor cores of its own: 4-bit integers are multiplied as 16-bit numbers.
    """

    name: FormatName
    bytes: float
    bits: int
    activations: int
    about: str


#: Bytes: 128x128 blocks have a scale of 32 bits (DeepSeek-V3, section 3.3), nvfp4 one of 8 bits
#: for 16 numbers and mxfp4 for 32 (OCP microscaling formats 1.0), AWQ and GPTQ a 16-bit scale and
#: a 4-bit zero for 128, compressed-tensors as in Kimi-K2 a 16-bit scale for 32.
NUMBER_FORMATS: dict[str, NumberFormat] = {
    f.name: f
    for f in (
        NumberFormat("bf16", 2.0, 16, 16, "16 bits"),
        NumberFormat("fp8", 1.0, 8, 8, "8 bits, a scale for each tensor or channel"),
        NumberFormat("fp8_block", 1.0 + 4 / 128**2, 8, 8, "8 bits, a scale for each 128x128 block"),
        NumberFormat("nvfp4", 0.5 + 1 / 16, 4, 4, "4 bits, a scale for each 16 numbers"),
        NumberFormat("mxfp4", 0.5 + 1 / 32, 4, 16, "4 bits, a scale for each 32 numbers"),
        NumberFormat("int4", 0.5 + 2.5 / 128, 4, 16, "4-bit integers in groups of 128 (AWQ, GPTQ)"),
        NumberFormat("int4_g32", 0.5 + 2 / 32, 4, 16, "4-bit integers in groups of 32"),
    )
}
KV_FORMATS: tuple[str, ...] = get_args(KvFormatName)


def find_number_format(name: str) -> NumberFormat:
    """A format by its name. Raises InputError if unknown."""
    if name in NUMBER_FORMATS:
        return NUMBER_FORMATS[name]
    raise InputError(
        f"number format {name!r} is not known{spelling_hint(name, NUMBER_FORMATS)}; expected "
        "one of "
        f"{', '.join(NUMBER_FORMATS)}"
    )
