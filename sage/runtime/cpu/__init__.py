"""Kernels for few rows on a CPU, and the choice between them and torch's: the names that other rooms use."""

from sage.runtime.cpu.choice import choose_kernels
from sage.runtime.cpu.kernels import C_SHIMS, kernel_facts
from sage.runtime.cpu.prompts import fast_prompts

__all__ = ["C_SHIMS", "choose_kernels", "fast_prompts", "kernel_facts"]
