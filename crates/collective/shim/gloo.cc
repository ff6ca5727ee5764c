// What the crate calls of libgloo (Debian libgloo-dev, 0.0~git20220518), in C. The functions are documented where
// Rust declares them, in src/backend/gloo/sys.rs. No exception leaves a function: it returns a code instead, and
// gloo_shim_error the text.
//
// If one of gloo's own waits times out, it closes every connection of the context, and an operation whose message is
// partly received is never woken. So the buffers here have a wait that changes nothing.

#include <stdexcept> // gloo/common/error.h forgets it

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <gloo/common/error.h>
#include <gloo/transport/address.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/tcp/unbound_buffer.h>

namespace tcp = gloo::transport::tcp;

namespace {

// As in sys.rs.
enum { GLOO_SHIM_OK = 0, GLOO_SHIM_PENDING = 1, GLOO_SHIM_IO = 2, GLOO_SHIM_REFUSED = 3 };

thread_local std::string last_error;

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
  } catch (const gloo::IoException &error) {
    return fail(GLOO_SHIM_IO, error.what());
  } catch (const std::exception &error) {
    return fail(GLOO_SHIM_REFUSED, error.what());
  } catch (...) {
    return fail(GLOO_SHIM_REFUSED, "an exception of unknown type");
  }
}

} // namespace

struct gloo_shim_mesh {
  // Destroyed last.
  std::shared_ptr<tcp::Device> device;
  std::shared_ptr<tcp::Context> wires;
};

// A buffer whose completions can be taken one by one.
struct gloo_shim_buffer final : tcp::UnboundBuffer {
  using tcp::UnboundBuffer::UnboundBuffer;

  // Takes one completion; returns whether there was one in time.
  bool take(bool received, std::chrono::microseconds time) {
    std::unique_lock<std::mutex> lock(m_);
    int &count = received ? recvCompletions_ : sendCompletions_;
    const auto over = [&] { return count > 0 || ex_ != nullptr; };
    if (!over() && time.count() > 0) {
      (received ? recvCv_ : sendCv_).wait_for(lock, time, over);
    }
    // Messages that were complete before the connection failed count.
    if (count > 0) {
      count--;
      return true;
    }
    throwIfException();
    return false;
  }
};

extern "C" {

const char *gloo_shim_error(void) { return last_error.c_str(); }

int gloo_shim_mesh_new(const char *address, int rank, int size, uint32_t connect_timeout_ms,
                       gloo_shim_mesh **out) {
  return guard([&] {
    tcp::attr attr(address);
    auto device = std::make_shared<tcp::Device>(tcp::CreateDeviceAttr(attr));
    auto wires = std::make_shared<tcp::Context>(device, rank, size);
    // A pair waits five times its timeout for its connection.
    wires->setTimeout(std::chrono::milliseconds(std::max(connect_timeout_ms / 5, 1u)));
    for (int peer = 0; peer < size; peer++) {
      if (peer != rank) {
        wires->createPair(peer);
      }
    }
    *out = new gloo_shim_mesh{std::move(device), std::move(wires)};
    return int{GLOO_SHIM_OK};
  });
}

int gloo_shim_mesh_address(gloo_shim_mesh *mesh, int peer, uint8_t *out, size_t capacity,
                           size_t *len) {
  return guard([&] {
    const std::vector<char> bytes = mesh->wires->getPair(peer)->address().bytes();
    if (bytes.size() > capacity) {
      throw std::length_error("the address is longer than gloo's maximum");
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
    *out = new gloo_shim_buffer(mesh->wires, memory, len);
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
    buffer->send(peer, slot, offset, len);
    return int{GLOO_SHIM_OK};
  });
}

int gloo_shim_receive(gloo_shim_buffer *buffer, int peer, uint64_t slot, size_t offset,
                      size_t len) {
  return guard([&] {
    buffer->recv(peer, slot, offset, len);
    return int{GLOO_SHIM_OK};
  });
}

int gloo_shim_wait(gloo_shim_buffer *buffer, int received, uint32_t micros) {
  return guard([&] {
    const bool taken = buffer->take(received != 0, std::chrono::microseconds(micros));
    return taken ? int{GLOO_SHIM_OK} : int{GLOO_SHIM_PENDING};
  });
}

} // extern "C"
