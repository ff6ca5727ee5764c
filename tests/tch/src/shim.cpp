// What tch leaves out of libtorch: word of each gradient during backward, and autocast on the CPU.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace {

enum class Answer : int32_t { elsewhere, taken, refused };
using Ready = Answer (*)(size_t tag, const float *gradient, size_t count);

// Runs right after a backward pass has put a variable's whole gradient into its `grad`.
struct Report final : torch::autograd::PostAccumulateGradHook {
  Report(Ready ready, size_t tag) : ready(ready), tag(tag) {}

  void operator()(const at::Tensor &variable) override {
    at::Tensor &grad = variable.mutable_grad();
    TORCH_CHECK(grad.layout() == at::kStrided && grad.device().is_cpu() && grad.is_contiguous() &&
                grad.scalar_type() == at::kFloat, "a gradient that is no dense f32 in host memory");
    Answer answer = ready(tag, grad.const_data_ptr<float>(), static_cast<size_t>(grad.numel()));
    if (answer == Answer::elsewhere) return;
    grad.reset(); // The next pass starts anew.
    TORCH_CHECK(answer == Answer::taken, "a gradient was refused");
  }

  Ready ready;
  size_t tag;
};

} // namespace

// Has `ready` called with `tag` for each gradient of the leaf `tensor`. 0 if it could not.
extern "C" int tch_engine_report(const void *tensor, Ready ready, size_t tag) noexcept try {
  torch::autograd::impl::set_post_acc_grad_hooks(*static_cast<const at::Tensor *>(tensor),
                                                 std::make_unique<Report>(ready, tag));
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
