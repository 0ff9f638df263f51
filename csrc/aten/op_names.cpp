#include "aten/op_names.h"

#include <unordered_set>

namespace offload {
namespace {

const std::unordered_set<std::string_view> kMovements{
    "aten::clone",
    "aten::cat",
    "aten::stack",
    "aten::_stack",
    "aten::_chunk_cat",
    "aten::index",
    "aten::_unsafe_index",
    "aten::_unsafe_masked_index",
    "aten::index_select",
    "aten::gather",
    "aten::take",
    "aten::repeat",
    "aten::flip",
    "aten::roll",
    "aten::constant_pad_nd",
    "aten::reflection_pad1d",
    "aten::reflection_pad2d",
    "aten::reflection_pad3d",
    "aten::replication_pad1d",
    "aten::replication_pad2d",
    "aten::replication_pad3d",
    "aten::tril",
    "aten::triu",
    "aten::masked_select",
    "aten::where",
    "aten::contiguous",
    "aten::_to_copy",
    "aten::complex",
    "aten::slice_scatter",
    "aten::select_scatter",
    "aten::index_put",
    "aten::_unsafe_index_put",
    "aten::index_copy",
    "aten::index_fill",
    "aten::put",
    "aten::scatter",
    "aten::repeat_interleave",
    "aten::embedding",
    "aten::rot90",
    "aten::block_diag",
    "aten::diag_embed",
    "aten::masked_fill",
    "aten::masked_scatter",
    "aten::as_strided_scatter",
    "aten::diagonal_scatter",
    "aten::pixel_shuffle",
    "aten::pixel_unshuffle",
    "aten::channel_shuffle",
    "aten::native_channel_shuffle",
    "aten::im2col",
    "aten::max_unpool2d",
    "aten::max_unpool3d",
    // Copies of views.
    "aten::_reshape_alias_copy",
    "aten::alias_copy",
    "aten::as_strided_copy",
    "aten::detach_copy",
    "aten::diagonal_copy",
    "aten::expand_copy",
    "aten::narrow_copy",
    "aten::permute_copy",
    "aten::select_copy",
    "aten::slice_copy",
    "aten::split_copy",
    "aten::split_with_sizes_copy",
    "aten::squeeze_copy",
    "aten::t_copy",
    "aten::transpose_copy",
    "aten::unbind_copy",
    "aten::unfold_copy",
    "aten::unsqueeze_copy",
    "aten::view_as_complex_copy",
    "aten::view_as_real_copy",
    "aten::view_copy",
};

const std::unordered_set<std::string_view> kForwardWrites{
    "aten::embedding_renorm_",
};

const std::unordered_set<std::string_view> kDeviceMinded{
    "aten::linear",
    "aten::matmul",
    "aten::batch_norm",
    "aten::instance_norm",
    "aten::layer_norm",
    "aten::group_norm",
    "aten::rms_norm",
    "aten::inner",
    "aten::stft",
    "aten::istft",
    "aten::linalg_multi_dot",
    "aten::lstm",
    "aten::gru",
    "aten::rnn_tanh",
    "aten::rnn_relu",
    "aten::lstm_cell",
    "aten::gru_cell",
    "aten::rnn_tanh_cell",
    "aten::rnn_relu_cell",
    "aten::scaled_dot_product_attention",
    "aten::conv1d",
    "aten::conv2d",
    "aten::conv3d",
    "aten::conv_transpose1d",
    "aten::conv_transpose2d",
    "aten::conv_transpose3d",
    "aten::_convolution_mode",
    "aten::einsum",
    "aten::tensordot",
    "aten::bilinear",
    "aten::dropout",
    "aten::feature_dropout",
    "aten::alpha_dropout",
    "aten::feature_alpha_dropout",
    "aten::rrelu",
    "aten::kron",
    "aten::embedding_bag",
    "aten::cdist",
    "aten::ctc_loss",
};

const std::unordered_set<std::string_view> kNeverIntercepted{
    "aten::copy_",
    "aten::copy",
    "aten::_copy_from",
    "aten::_copy_from_and_resize",
    "aten::resize_",
    "aten::resize_as_",
    "aten::resize",
    "aten::resize_as",
    "aten::set_",
    "aten::set",
    "aten::set_data",
    "inductor::resize_storage_bytes_", // of compiled `untyped_storage().resize_()`
    "aten::_set_data",
    "aten::detach",
    "aten::detach_",
    "aten::alias",
    "aten::item",
    "aten::_local_scalar_dense",
    "aten::record_stream",
    "aten::_has_compatible_shallow_copy_type",
    "aten::requires_grad_",
    "aten::retain_grad",
    "aten::_fw_primal",
    "aten::_make_dual",
    "aten::_unpack_dual",
    "aten::is_pinned",
    "aten::pin_memory",
    "aten::_pin_memory",
    "aten::to",
    "aten::lift",
    "aten::lift_fresh",
    "aten::lift_fresh_copy",
    "aten::_version",
    "aten::is_leaf",
    "aten::output_nr",
    "aten::data",
    "aten::_backward",
    "aten::sym_size",
    "aten::sym_stride",
    "aten::sym_numel",
    "aten::sym_storage_offset",
    "aten::is_set_to",
    "aten::_is_zerotensor",
    "aten::is_conj",
    "aten::is_neg",
    "aten::_conj",
    "aten::_neg_view",
    "aten::_conj_physical",
    "aten::resolve_conj",
    "aten::resolve_neg",
    "aten::_assert_tensor_metadata",
    "aten::_print",
    "aten::rename",
    "aten::rename_",
    "aten::result_type",
    "aten::can_cast",
    "aten::is_same_size",
    "aten::_shape_as_tensor",
    "aten::_resize_output_",
    "aten::_resize_output",
    "aten::_unsafe_view",
    "aten::_reshape_copy",
    "aten::_has_same_storage_numel",
    "aten::_new_zeros_with_same_feature_meta",
    // What a sparse tensor is made of.
    "aten::_nnz",
    "aten::sparse_dim",
    "aten::dense_dim",
    "aten::_dimI",
    "aten::_dimV",
    "aten::is_coalesced",
    "aten::_coalesced_",
    "aten::copy_sparse_to_sparse_",
    "aten::sparse_resize_",
    "aten::sparse_resize_and_clear_",
    "aten::resize_as_sparse_",
    // Their sizes are a CPU tensor, which is no operand.
    "aten::_pack_padded_sequence",
    "aten::_pad_packed_sequence",
    "aten::_pack_padded_sequence_backward",
    // Views, though their schemas don't say so.
    "aten::unsafe_chunk",
    "aten::unsafe_split",
    "aten::unsafe_split_with_sizes",
    "aten::broadcast_tensors",
    "aten::atleast_1d",
    "aten::atleast_2d",
    "aten::atleast_3d",
    "aten::align_as",
    "aten::align_tensors",
    "aten::unflatten_dense_tensors",
};

const std::unordered_set<std::string_view> kUpdatesStatistics{
    "aten::batch_norm_update_stats",
    "aten::batch_norm_gather_stats",
    "aten::batch_norm_gather_stats_with_counts",
};

} // namespace

bool onlyMoves(std::string_view name) {
  return kMovements.contains(name);
}

bool writesInForward(std::string_view name) {
  return kForwardWrites.contains(name);
}

bool picksByDevice(std::string_view name) {
  return kDeviceMinded.contains(name);
}

bool hasItsOwnKernel(std::string_view name) {
  return kNeverIntercepted.contains(name);
}

bool alwaysUpdatesStatistics(std::string_view name) {
  return kUpdatesStatistics.contains(name);
}

} // namespace offload
