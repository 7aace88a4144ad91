// The stable C interface of torch (torch/csrc/inductor/aoti_torch/c/shim.h), as far as it is used here.

#pragma once

#include <cstdint>

extern "C" {

typedef struct AtenTensorOpaque* AtenTensorHandle;
int32_t aoti_torch_get_data_ptr(AtenTensorHandle, void**);
int32_t aoti_torch_get_dim(AtenTensorHandle, int64_t*);
int32_t aoti_torch_get_sizes(AtenTensorHandle, int64_t**);
int32_t aoti_torch_get_dtype(AtenTensorHandle, int32_t*);
int32_t aoti_torch_is_contiguous(AtenTensorHandle, bool*);
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_empty_strided(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, AtenTensorHandle*);
int32_t aoti_torch_get_strides(AtenTensorHandle, int64_t**);

}  // extern "C"
