"""What a device runs and keeps where it differs from eager CPU kernels.

Traces are made on fake CPU tensors. On `cuda` three ops run another kernel, which keeps other
tensors for backward:

    op        cpu                                   cuda (rules below)
    sdpa      flash kernel; with dropout the        fused kernel always: keeps query, key, value,
              products and softmax one by one       mask, output and a float32 logsumexp
    dropout   keeps noise in the input's dtype      keeps a mask of one byte an element
    rms_norm  elementwise ops one by one            fused kernel: keeps input and rstd

The rules are custom ops that have shapes and gradients but no implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import torch

from autoplan.autocast import InAutocast
from autoplan.errors import TraceError
from autoplan.kernels import storage_key, tensors_in
from autoplan.program import Op

__all__ = ["Backend", "replacement", "with_true_statistics", "workspace_bytes"]

Backend = Literal["cpu", "cuda"]

_FUSED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def replacement(target: Callable[..., Any], backend: Backend) -> Callable[..., Any]:
    """Return the function to run on fake tensors instead of `target` for `backend`."""
    if backend == "cpu":
        return target
    if isinstance(target, InAutocast):
        return target.around(replacement(target.inner, backend))
    return _CUDA_RULES.get(str(target), target)


def with_true_statistics(
    op: Op, values: Mapping[str, Any], kept: dict[int, int], backend: Backend
) -> dict[int, int]:
    """Return the kept bytes of an op with the statistics of a norm in float32 where they are.

    Fake tensors have them in the dtype of the input. Kernels have them in float32 where the norm of
    a 16-bit input has weights or running statistics in float32, and on CUDA those of batch and
    layer norms always.
    Source: `layer_norm.cpp`, `group_norm.cpp`, `Normalization.cpp` of ATen (`is_mixed_type`).
    """
    name = op.target_name.removeprefix("aten.").partition(".")[0].removeprefix("native_")
    if name not in _STATISTICS:
        return kept
    tensors = [values[arg] for arg in op.inputs()]
    image, others = tensors[0], tensors[1:]
    is_mixed = any(t.dtype is torch.float32 for t in others if isinstance(t, torch.Tensor))
    is_wide = is_mixed or (backend == "cuda" and name != "group_norm")
    if image.itemsize != 2 or not is_wide:
        return kept
    narrow = 2 * _STATISTICS[name](image, op)
    owned = {storage_key(tensor) for value in values.values() for tensor in tensors_in(value)}
    return {
        key: 2 * narrow if nbytes == narrow and key not in owned else nbytes
        for key, nbytes in kept.items()
    }


_STATISTICS: Mapping[str, Callable[[torch.Tensor, Op], int]] = {
    "batch_norm": lambda image, _: image.shape[1],
    "instance_norm": lambda image, _: image.shape[0] * image.shape[1],
    "layer_norm": lambda image, op: image.shape[: image.dim() - len(op.args[1])].numel(),
    "group_norm": lambda image, op: image.shape[0] * int(op.args[1]),
}
"""Numbers of means that a norm of an image keeps."""


def workspace_bytes(kernels: list[str], inputs: list[torch.Tensor]) -> int:
    """Return transient bytes that a kernel takes inside and that no meter sees.

    The flash backward accumulates the query's gradient in float32 and keeps a float32 row sum.
    Source: FlashAttention-2, `flash_api.cpp`, `dq_accum` and `softmax_d`.
    """
    if "autoplan::attention_cuda_backward" not in kernels:
        return 0
    query = inputs[0]
    return 4 * query.numel() + 4 * query.shape[:-1].numel()


def _no_kernel(*_: Any) -> Any:
    raise TraceError("this op exists for tracing only")


_attention_op = torch.library.custom_op(
    "autoplan::attention_cuda",
    _no_kernel,
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask) -> (Tensor, Tensor)",
)
_attention_backward_op = torch.library.custom_op(
    "autoplan::attention_cuda_backward",
    _no_kernel,
    mutates_args=(),
    schema="(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor? mask, "
    "Tensor output, Tensor logsumexp) -> (Tensor, Tensor, Tensor)",
)
_rms_norm_op = torch.library.custom_op(
    "autoplan::rms_norm_cuda",
    _no_kernel,
    mutates_args=(),
    schema="(Tensor input, Tensor? weight, int num_dims) -> (Tensor, Tensor)",
)
_rms_norm_backward_op = torch.library.custom_op(
    "autoplan::rms_norm_cuda_backward",
    _no_kernel,
    mutates_args=(),
    schema="(Tensor gradient, Tensor input, Tensor? weight, Tensor rstd) -> (Tensor, Tensor)",
)


@_attention_op.register_fake
def _attention_fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    output = torch.empty_like(query)
    if value.shape[-1] != query.shape[-1]:
        # In memory as the query lies, whose dimensions may be transposed.
        order = sorted(range(query.dim()), key=lambda dim: query.stride(dim), reverse=True)
        shape = (*query.shape[:-1], value.shape[-1])
        output = torch.empty_permuted(shape, order, dtype=query.dtype, device=query.device)
    return output, query.new_empty(query.shape[:-1], dtype=torch.float32)


@_attention_backward_op.register_fake
def _attention_backward_fake(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep_attention(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, *output)


def _attention_gradient(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
    query, key, value, mask, output, logsumexp = ctx.saved_tensors
    gradients = torch.ops.autoplan.attention_cuda_backward(
        gradient, query, key, value, mask, output, logsumexp
    )
    mask_gradient = torch.empty_like(mask) if ctx.needs_input_grad[3] else None
    return (*gradients, mask_gradient)


_attention_op.register_autograd(_attention_gradient, setup_context=_keep_attention)


@_rms_norm_op.register_fake
def _rms_norm_fake(
    input: torch.Tensor, weight: torch.Tensor | None, num_dims: int
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*input.shape[: input.dim() - num_dims], *([1] * num_dims))
    return torch.empty_like(input), input.new_empty(shape, dtype=torch.float32)


@_rms_norm_backward_op.register_fake
def _rms_norm_backward_fake(
    gradient: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(input), torch.empty_like(weight if weight is not None else rstd)


def _keep_rms_norm(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])


def _rms_norm_gradient(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
    input, weight, rstd = ctx.saved_tensors
    gradients = torch.ops.autoplan.rms_norm_cuda_backward(gradient, input, weight, rstd)
    return gradients[0], gradients[1] if weight is not None else None, None


_rms_norm_op.register_autograd(_rms_norm_gradient, setup_context=_keep_rms_norm)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    if query.dim() == 4 and query.dtype in _FUSED_DTYPES:
        return cast(
            torch.Tensor, torch.ops.autoplan.attention_cuda(query, key, value, attn_mask)[0]
        )
    return cast(
        torch.Tensor,
        torch.ops.aten.scaled_dot_product_attention.default(
            query, key, value, attn_mask, dropout_p, is_causal, **kwargs
        ),
    )


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0:
        return cast(torch.Tensor, torch.ops.aten.dropout.default(input, p, train))
    return cast(torch.Tensor, torch.ops.aten.native_dropout.default(input, p, train)[0])


def _rms_norm(
    input: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    result = torch.ops.autoplan.rms_norm_cuda(input, weight, len(normalized_shape))
    return cast(torch.Tensor, result[0])


_CUDA_RULES: Mapping[str, Callable[..., Any]] = {
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.dropout.default": _dropout,
    "aten.rms_norm.default": _rms_norm,
}
