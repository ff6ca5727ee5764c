// Parts of libtorch that tch lacks: a report of each gradient during backward, autocast on the CPU.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

using torch::autograd::PostAccumulateGradHook;
using Ready = int (*)(void *pass, size_t index, const float *gradient, size_t count);

namespace {

// Runs right after a backward pass has put a variable's whole gradient into its `grad`.
struct Report final : PostAccumulateGradHook {
  Report(Ready ready, void *pass, size_t index) : ready(ready), pass(pass), index(index) {}

  void operator()(const at::Tensor &variable) override {
    const at::Tensor grad = std::move(variable.mutable_grad()); // The next pass starts anew.
    TORCH_CHECK(grad.layout() == at::kStrided && grad.device().is_cpu() && grad.is_contiguous() &&
                grad.scalar_type() == at::kFloat, "a gradient that is no dense f32 in host memory");
    TORCH_CHECK(ready(pass, index, grad.const_data_ptr<float>(), static_cast<size_t>(grad.numel())),
                "a gradient was refused");
  }

  Ready ready;
  void *pass;
  size_t index;
};

} // namespace

// Has `ready` called with `pass` and `index` for each gradient of the leaf `tensor`; if it is null,
// nothing any more. 0 if it could not.
extern "C" int tch_engine_hook(const void *tensor, Ready ready, void *pass, size_t index) noexcept try {
  std::unique_ptr<PostAccumulateGradHook> hook;
  if (ready) hook = std::make_unique<Report>(ready, pass, index);
  torch::autograd::impl::set_post_acc_grad_hooks(*static_cast<const at::Tensor *>(tensor), std::move(hook));
  return 1;
} catch (...) {
  return 0;
}

// Turns autocast on the CPU on for this thread, lowering to f16 or else to bf16; or off, in turn.
extern "C" void tch_engine_autocast(int on, int f16) noexcept {
  at::autocast::set_autocast_enabled(at::kCPU, on);
  if (on) {
    at::autocast::set_autocast_dtype(at::kCPU, f16 ? at::kHalf : at::kBFloat16);
    at::autocast::increment_nesting();
  } else if (at::autocast::decrement_nesting() == 0) {
    at::autocast::clear_cache();
  }
}
