// See gloo.h.
//
// Gloo's own waits, when time is over, close every connection of the context, and an operation
// whose message is half received is never woken. So the buffers here are of a class of our own
// that waits in slices and only looks; a context of our own hands them to gloo's collectives too.

#include "gloo.h"

#include <stdexcept> // gloo/common/error.h forgets it

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <gloo/allreduce.h>
#include <gloo/common/error.h>
#include <gloo/context.h>
#include <gloo/reduce.h>
#include <gloo/transport/address.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/tcp/unbound_buffer.h>

namespace tcp = gloo::transport::tcp;

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::microseconds kSlice{1000};

thread_local std::string last_error;

// A wait for a peer that came to no end.
struct Unfinished : std::runtime_error {
  Unfinished(int code, int peer) : std::runtime_error("unfinished"), code(code), peer(peer) {}
  const int code;
  const int peer;
};

int fail(int code, const char *text) noexcept {
  try {
    last_error = text;
  } catch (...) {
    last_error.clear();
  }
  return code;
}

template <class F>
int guard(F &&call) noexcept {
  try {
    return call();
  } catch (const Unfinished &error) {
    return fail(error.code, error.what());
  } catch (const gloo::IoException &error) {
    return fail(GLOO_SHIM_IO, error.what());
  } catch (const std::exception &error) {
    return fail(GLOO_SHIM_REFUSED, error.what());
  } catch (...) {
    return fail(GLOO_SHIM_REFUSED, "an exception of unknown type");
  }
}

class Wires;

// A buffer that can be looked at.
class Patient final : public tcp::UnboundBuffer {
 public:
  Patient(const std::shared_ptr<tcp::Context> &wires, void *memory, size_t size)
      : tcp::UnboundBuffer(wires, memory, size) {}

  // Takes note of one completion; whether there was one in time.
  bool take(bool received, std::chrono::microseconds time) {
    std::unique_lock<std::mutex> lock(m_);
    int &count = received ? recvCompletions_ : sendCompletions_;
    const auto over = [&] { return count > 0 || ex_ != nullptr; };
    if (!over() && time.count() > 0) {
      (received ? recvCv_ : sendCv_).wait_for(lock, time, over);
    }
    // What came before the connection failed has come.
    if (count > 0) {
      count--;
      return true;
    }
    throwIfException();
    return false;
  }

  // For gloo's collectives, which call no other form of either.
  bool waitRecv(int *, std::chrono::milliseconds timeout) override {
    return wait(true, timeout);
  }
  bool waitSend(int *, std::chrono::milliseconds timeout) override {
    return wait(false, timeout);
  }
  void send(int peer, uint64_t slot, size_t offset, size_t size) override {
    to_ = peer;
    tcp::UnboundBuffer::send(peer, slot, offset, size);
  }
  void recv(int peer, uint64_t slot, size_t offset, size_t size) override {
    from_ = peer;
    tcp::UnboundBuffer::recv(peer, slot, offset, size);
  }
  using tcp::UnboundBuffer::recv;

 private:
  bool wait(bool received, std::chrono::milliseconds timeout);

  int to_ = -1;
  int from_ = -1;
};

// Connections to all peers, whose buffers are Patients.
class Wires final : public tcp::Context {
 public:
  using tcp::Context::Context;

  std::unique_ptr<gloo::transport::UnboundBuffer> createUnboundBuffer(void *memory,
                                                                      size_t size) override {
    return std::make_unique<Patient>(shared_from_this(), memory, size);
  }

  bool told_to_stop() const {
    return reduction != nullptr && reduction->check(reduction->arg) != 0;
  }

  // The collective under way.
  const gloo_shim_reduction *reduction = nullptr;
};

bool Patient::wait(bool received, std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  while (!take(received, kSlice)) {
    const int peer = received ? from_ : to_;
    if (static_cast<const Wires &>(*context_).told_to_stop()) {
      throw Unfinished(GLOO_SHIM_STOPPED, peer);
    }
    if (Clock::now() >= deadline) {
      throw Unfinished(GLOO_SHIM_LATE, peer);
    }
  }
  return true;
}

// What gloo's collectives take, around connections made elsewhere.
class Group final : public gloo::Context {
 public:
  Group(int rank, int size, std::shared_ptr<gloo::transport::Device> device,
        std::shared_ptr<gloo::transport::Context> wires)
      : gloo::Context(rank, size) {
    device_ = std::move(device);
    transportContext_ = std::move(wires);
  }
};

// Options keep of the type of their elements only its size.
template <class Options>
void set_memory(Options &options, void *memory, const gloo_shim_reduction &reduction) {
  switch (reduction.element_bytes) {
    case 1:
      return options.setOutput(static_cast<uint8_t *>(memory), reduction.count);
    case 2:
      return options.setOutput(static_cast<uint16_t *>(memory), reduction.count);
    case 4:
      return options.setOutput(static_cast<uint32_t *>(memory), reduction.count);
    case 8:
      return options.setOutput(static_cast<uint64_t *>(memory), reduction.count);
  }
  throw std::invalid_argument("no element has this size");
}

} // namespace

struct gloo_shim_mesh {
  // Goes last.
  std::shared_ptr<tcp::Device> device;
  std::shared_ptr<Wires> wires;
  std::shared_ptr<Group> group;
};

struct gloo_shim_buffer {
  Patient buffer;
};

namespace {

template <class Options, class Run>
int reduce(gloo_shim_mesh *mesh, void *memory, gloo_shim_reduction *reduction, Run run) noexcept {
  reduction->peer = -1;
  mesh->wires->reduction = reduction;
  const int code = guard([&] {
    try {
      Options options(mesh->group);
      set_memory(options, memory, *reduction);
      const auto fold = reduction->fold;
      const auto arg = reduction->arg;
      options.setReduceFunction([fold, arg](void *out, const void *a, const void *b, size_t n) {
        fold(arg, out, a, b, n);
      });
      options.setTag(reduction->tag);
      options.setTimeout(std::chrono::milliseconds(reduction->timeout_ms));
      run(options);
      return int{GLOO_SHIM_OK};
    } catch (const Unfinished &wait) {
      reduction->peer = wait.peer;
      throw;
    }
  });
  mesh->wires->reduction = nullptr;
  return code;
}

} // namespace

extern "C" {

const char *gloo_shim_error(void) { return last_error.c_str(); }

int gloo_shim_mesh_new(const char *address, int rank, int size, uint32_t connect_timeout_ms,
                       gloo_shim_mesh **out) {
  return guard([&] {
    tcp::attr attr(address);
    auto device = std::make_shared<tcp::Device>(tcp::CreateDeviceAttr(attr));
    auto wires = std::make_shared<Wires>(device, rank, size);
    // A pair waits five times its timeout for its connection.
    wires->setTimeout(std::chrono::milliseconds(std::max(connect_timeout_ms / 5, 1u)));
    for (int peer = 0; peer < size; peer++) {
      if (peer != rank) {
        wires->createPair(peer);
      }
    }
    auto group = std::make_shared<Group>(rank, size, device, wires);
    *out = new gloo_shim_mesh{std::move(device), std::move(wires), std::move(group)};
    return int{GLOO_SHIM_OK};
  });
}

int gloo_shim_mesh_address(gloo_shim_mesh *mesh, int peer, uint8_t *out, size_t capacity,
                           size_t *len) {
  return guard([&] {
    const std::vector<char> bytes = mesh->wires->getPair(peer)->address().bytes();
    if (bytes.size() > capacity) {
      throw std::length_error("an address longer than gloo says it can be");
    }
    std::copy(bytes.begin(), bytes.end(), out);
    *len = bytes.size();
    return int{GLOO_SHIM_OK};
  });
}

int gloo_shim_mesh_connect(gloo_shim_mesh *mesh, int peer, const uint8_t *address, size_t len) {
  return guard([&] {
    mesh->wires->getPair(peer)->connect(std::vector<char>(address, address + len));
    return int{GLOO_SHIM_OK};
  });
}

void gloo_shim_mesh_free(gloo_shim_mesh *mesh) {
  guard([&] {
    delete mesh;
    return int{GLOO_SHIM_OK};
  });
}

int gloo_shim_buffer_new(gloo_shim_mesh *mesh, void *memory, size_t len, gloo_shim_buffer **out) {
  return guard([&] {
    *out = new gloo_shim_buffer{{mesh->wires, memory, len}};
    return int{GLOO_SHIM_OK};
  });
}

void gloo_shim_buffer_free(gloo_shim_buffer *buffer) {
  guard([&] {
    delete buffer;
    return int{GLOO_SHIM_OK};
  });
}

int gloo_shim_send(gloo_shim_buffer *buffer, int peer, uint64_t slot, size_t offset, size_t len) {
  return guard([&] {
    buffer->buffer.send(peer, slot, offset, len);
    return int{GLOO_SHIM_OK};
  });
}

int gloo_shim_receive(gloo_shim_buffer *buffer, int peer, uint64_t slot, size_t offset,
                      size_t len) {
  return guard([&] {
    buffer->buffer.recv(peer, slot, offset, len);
    return int{GLOO_SHIM_OK};
  });
}

int gloo_shim_wait(gloo_shim_buffer *buffer, int received, uint32_t micros) {
  return guard([&] {
    const bool taken = buffer->buffer.take(received != 0, std::chrono::microseconds(micros));
    return taken ? int{GLOO_SHIM_OK} : int{GLOO_SHIM_PENDING};
  });
}

int gloo_shim_all_reduce(gloo_shim_mesh *mesh, void *memory, gloo_shim_reduction *reduction) {
  return reduce<gloo::AllreduceOptions>(mesh, memory, reduction,
                                        [](auto &options) { gloo::allreduce(options); });
}

int gloo_shim_reduce(gloo_shim_mesh *mesh, void *memory, int root,
                     gloo_shim_reduction *reduction) {
  return reduce<gloo::ReduceOptions>(mesh, memory, reduction, [root](auto &options) {
    options.setRoot(root);
    gloo::reduce(options);
  });
}

} // extern "C"
