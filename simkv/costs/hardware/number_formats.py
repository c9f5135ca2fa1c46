"""Number formats of weights and KV, with their sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from simkv.core.errors import InputError, spelling_hint

FormatName = Literal["bf16", "fp8", "fp8_block", "nvfp4", "mxfp4", "int4", "int4_g32"]
KvFormatName = Literal["bf16", "fp8", "nvfp4"]


@dataclass(frozen=True)
class NumberFormat:
    """A number format of weights.

    ``bytes`` is the size per weight, including the scales. ``bits`` is the size without scales.
    ``activations`` is the size in bits of the operands on tensor cores.
    """

    name: FormatName
    bytes: float
    bits: int
    activations: int
    about: str


#: Scales per format: 32 bits per 128x128 block for 8-bit blocks (DeepSeek-V3, section 3.3); 8 bits
#: per 16 numbers for nvfp4 and per 32 for mxfp4 (OCP microscaling formats 1.0); 16 bits and a 4-bit
#: zero point per 128 for AWQ and GPTQ; 16 bits per 32 for compressed-tensors as in Kimi-K2.
NUMBER_FORMATS: dict[str, NumberFormat] = {
    f.name: f
    for f in (
        NumberFormat("bf16", 2.0, 16, 16, "16 bits"),
        NumberFormat("fp8", 1.0, 8, 8, "8 bits, one scale per tensor or channel"),
        NumberFormat("fp8_block", 1.0 + 4 / 128**2, 8, 8, "8 bits, one scale per 128x128 block"),
        NumberFormat("nvfp4", 0.5 + 1 / 16, 4, 4, "4 bits, one scale per 16 numbers"),
        NumberFormat("mxfp4", 0.5 + 1 / 32, 4, 16, "4 bits, one scale per 32 numbers"),
        NumberFormat("int4", 0.5 + 2.5 / 128, 4, 16, "4-bit integers in groups of 128 (AWQ, GPTQ)"),
        NumberFormat("int4_g32", 0.5 + 2 / 32, 4, 16, "4-bit integers in groups of 32"),
    )
}
KV_FORMATS: tuple[str, ...] = get_args(KvFormatName)


def find_number_format(name: str) -> NumberFormat:
    """Return the number format with the given name. Raises InputError if it is unknown."""
    if name in NUMBER_FORMATS:
        return NUMBER_FORMATS[name]
    raise InputError(
        f"unknown number format {name!r}{spelling_hint(name, NUMBER_FORMATS)}; expected one of "
        f"{', '.join(NUMBER_FORMATS)}"
    )
