"""What autocast casts on CUDA, for traces made on fake CPU tensors.

The two devices cast for other ops: on CUDA norms, softmax, losses and sums run in float32, which
the CPU leaves in the lower dtype. So a trace for CUDA does not run under autocast of the CPU, but
wraps every op by these rules.
Source: the lists of `ATen/autocast_mode.h`, torch 2.13; `cross_entropy_loss` stands for the
`log_softmax` and `nll_loss` that it is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoplan.autocast import InAutocast, around_step
from autoplan.kernels import storage_key
from autoplan.opaque import OpaqueCall
from autoplan.program import Op

__all__ = ["CudaAutocast"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LOWER = _names("""
    _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
    convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
    chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell lstm gru
    scaled_dot_product_attention
""")
# The last line takes a dtype instead; on lower dtypes that is float32.
_FLOAT32 = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus
    layer_norm native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity
    poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d nll_loss_nd hinge_embedding_loss
    kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss
    soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist
    pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa cross_entropy_loss
    prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum norm
""")
_WIDEST = _names("""
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""")


@dataclass(frozen=True, slots=True)
class CudaAutocast:
    """The casts of a step under autocast on CUDA; trained weights are cast once.

    Attributes:
        dtype: that products run in.
    """

    dtype: torch.dtype
    _casts: dict[int, torch.Tensor] = field(default_factory=dict)

    def around(self, target: Callable[..., Any], op: Op) -> Callable[..., Any]:
        """Return what runs for an op so that it casts its arguments as autocast would.

        An op in an autocast region of the model follows that region; a module that stays one op
        runs under autocast of the CPU.

        Args:
            target: what runs, the op's own operator or one in its place.
            op: tells which operator it is.
        """
        if isinstance(op.target, InAutocast):
            return target
        if isinstance(op.target, OpaqueCall):
            return self._under_cpu(target)
        key = op.target_name.removeprefix("aten.").partition(".")[0]
        if key not in _LOWER | _FLOAT32 | _WIDEST:
            return target

        def cast(*args: Any, **kwargs: Any) -> Any:
            wanted = self._wanted(key, (args, kwargs))
            args, kwargs = pytree.tree_map(lambda leaf: self._cast(leaf, wanted), (args, kwargs))
            return target(*args, **kwargs)

        return cast

    def _under_cpu(self, target: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with around_step(self.dtype):
                return target(*args, **kwargs)

        return run

    def _wanted(self, key: str, arguments: Any) -> torch.dtype:
        if key in _LOWER:
            return self.dtype
        if key in _FLOAT32:
            return torch.float32
        leaves = pytree.tree_leaves(arguments)
        is_wide = any(isinstance(x, torch.Tensor) and x.dtype is torch.float32 for x in leaves)
        return torch.float32 if is_wide else self.dtype

    def _cast(self, leaf: Any, wanted: torch.dtype) -> Any:
        """Return a tensor in the wanted dtype; float64 and integers stay as they are."""
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        if leaf.dtype is torch.float64 or leaf.dtype is wanted:
            return leaf
        is_cached = leaf.is_leaf and leaf.requires_grad and wanted is self.dtype
        if not is_cached:
            return leaf.to(wanted)
        if storage_key(leaf) not in self._casts:
            self._casts[storage_key(leaf)] = leaf.to(wanted)
        return self._casts[storage_key(leaf)]
