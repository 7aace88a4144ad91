"""Kernels for few rows on a CPU, in compiled passes and for prompts, and where weights lie: the names that other rooms use."""

from sage.runtime.cpu.graph import use_kernels
from sage.runtime.cpu.huge_pages import use_huge_pages
from sage.runtime.cpu.kernels import C_SHIMS, fast_prompts, has_kernels, kernel_digest

__all__ = ["C_SHIMS", "fast_prompts", "has_kernels", "kernel_digest", "use_huge_pages", "use_kernels"]
