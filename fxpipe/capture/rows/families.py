"""Ops by what they do to the rows of a microbatch; one that is in no family is told (``analysis.py``)."""

from __future__ import annotations

from typing import Any

import torch

from fxpipe.ir.dims import COPIES, RESHAPES, SUMS


class _Ops:
    """Torch's ops; the name of one that this torch does not have, as versions drop some."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops.aten, name, name)


aten = _Ops()

#: Ops that give the same entries, in order, another shape.
SHAPES = RESHAPES | {aten.squeeze, aten.unsqueeze, aten.view_as_complex, aten.view_as_real}
#: Ops without a tag that compute each entry from those at the same place; the losses among them may add up.
POINTWISE = COPIES | {
    aten._conj, aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams, aten.bernoulli,
    aten.binary_cross_entropy, aten.binary_cross_entropy_with_logits, aten.bucketize, aten.complex,
    aten.copy, aten.dropout, aten.expand, aten.fake_quantize_per_tensor_affine_cachemask, aten.fill,
    aten.floor_divide, aten.hardswish, aten.huber_loss, aten.l1_loss, aten.lift_fresh_copy,
    aten.log_sigmoid_forward, aten.masked_fill, aten.masked_scatter, aten.mse_loss, aten.native_dropout,
    aten.poisson, aten.polar, aten.rand_like, aten.randint_like, aten.randn_like, aten.resolve_conj,
    aten.rrelu_with_noise_functional, aten.rsub, aten.smooth_l1_loss, aten.soft_margin_loss,
}  # fmt: skip
#: Ops whose results have the shape of an operand and none of its numbers.
NO_NUMBERS = {
    aten.empty_like, aten.full_like, aten.isfinite, aten.isinf, aten.isnan, aten.new_empty, aten.new_full,
    aten.new_ones, aten.new_zeros, aten.ones_like, aten.zero, aten.zeros_like,
}  # fmt: skip
#: Ops that take some of the entries along a dimension.
PARTS = {
    aten.select, aten.slice, aten.split, aten.split_with_sizes, aten.unbind, aten.unsafe_split,
    aten.unsafe_split_with_sizes, aten.chunk,
}  # fmt: skip
#: Ops along dimensions that they name, which they do away with; those of them that choose.
CHOICES = {
    aten.argmax, aten.argmin, aten.kthvalue, aten.max, aten.median, aten.min, aten.mode, aten.nanmedian,
}  # fmt: skip
REDUCTIONS = SUMS | CHOICES | {
    aten.all, aten.amax, aten.amin, aten.any, aten.dist, aten.frobenius_norm, aten.linalg_vector_norm,
    aten.logsumexp, aten.norm, aten.nuclear_norm, aten.prod, aten.std, aten.std_mean, aten.var, aten.var_mean,
}  # fmt: skip
#: Ops along dimensions that they name, whose results have these; those of them that choose, or move.
ORDERS = {aten.sort, aten.topk}
MOVES = {aten.flip, aten.roll}
ALONG = ORDERS | MOVES | {
    aten._fft_c2c, aten._fft_c2r, aten._fft_r2c, aten._log_softmax, aten._safe_softmax, aten._softmax,
    aten.cummax, aten.cummin, aten.cumprod, aten.cumsum, aten.glu, aten.logcumsumexp, aten.unfold,
}  # fmt: skip
#: Ops along as many of the last dimensions as their names say.
SPATIAL = {
    aten._adaptive_avg_pool2d, aten._adaptive_avg_pool3d, aten._upsample_bicubic2d_aa,
    aten._upsample_bilinear2d_aa, aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d,
    aten._upsample_nearest_exact3d, aten.adaptive_max_pool2d, aten.adaptive_max_pool3d, aten.avg_pool2d,
    aten.avg_pool3d, aten.max_pool2d_with_indices, aten.max_pool3d_with_indices, aten.reflection_pad1d,
    aten.reflection_pad2d, aten.reflection_pad3d, aten.replication_pad1d, aten.replication_pad2d,
    aten.replication_pad3d, aten.upsample_bicubic2d, aten.upsample_bilinear2d, aten.upsample_linear1d,
    aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d, aten.upsample_trilinear3d,
}  # fmt: skip
#: Ops of rows in the first dimension, and of what lies in the others.
LEADING = {
    aten._native_batch_norm_legit_no_training, aten._prelu_kernel, aten._trilinear, aten.channel_shuffle,
    aten.col2im, aten.convolution, aten.grid_sampler_2d, aten.grid_sampler_3d, aten.im2col,
    aten.max_unpool2d, aten.max_unpool3d, aten.native_group_norm, aten.pixel_shuffle, aten.pixel_unshuffle,
}  # fmt: skip
#: Those of them whose other operands have rows there as well.
PAIRS = {
    aten._trilinear, aten.grid_sampler_2d, aten.grid_sampler_3d, aten.max_unpool2d, aten.max_unpool3d,
}  # fmt: skip
#: Ops of the matrices in the last two dimensions.
MATRICES = {
    aten.cholesky, aten.linalg_cholesky_ex, aten.linalg_eigh, aten.linalg_inv_ex, aten.linalg_lu_factor_ex,
    aten.linalg_matrix_exp, aten.linalg_qr, aten._linalg_det, aten._linalg_eigh, aten._linalg_slogdet,
    aten._linalg_solve_ex, aten._linalg_svd, aten.triangular_solve,
}  # fmt: skip
#: Norms by all rows, where they are in training.
BATCH_NORMS = {
    aten._native_batch_norm_legit, aten._native_batch_norm_legit_functional, aten.cudnn_batch_norm,
    aten.native_batch_norm,
}  # fmt: skip
#: Norms along the last dimensions, of which they get the sizes.
LAST = {aten._fused_rms_norm, aten.native_layer_norm, aten.rms_norm}
#: Products of matrices, with the place of the first among their operands.
PRODUCTS = {
    aten._scaled_mm: 0, aten.addmm: 1, aten.addmv: 1, aten.baddbmm: 1, aten.bmm: 0, aten.dot: 0, aten.mm: 0,
    aten.mv: 0,
}  # fmt: skip
ATTENTION = {
    aten._scaled_dot_product_attention_math, aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
}  # fmt: skip
#: Ops that put numbers at places which others name; those of them that add them up there.
ADDED = {aten.index_add, aten.scatter_add}
PLACED = ADDED | {aten.index_copy, aten.index_put, aten.scatter, aten.scatter_reduce}
#: Those among them, and one that takes such numbers, whose indices have a place for each entry of some rows.
ALIGNED = {aten.gather, aten.scatter, aten.scatter_add, aten.scatter_reduce}
#: Ops that count how often entries have each number.
COUNTS = {aten.bincount, aten.histc}
#: Ops that put a part into a value.
INSERTED = {aten.select_scatter, aten.slice_scatter}
#: Ops that put values side by side.
JOINED = {aten.cat, aten.stack}
#: Pointwise ops and others that are linear in all of their operands together.
LINEAR = COPIES | {
    aten.add, aten.expand, aten.masked_fill, aten.nan_to_num, aten.neg, aten.rsub, aten.sub, aten.where,
    aten.copy,
}  # fmt: skip
