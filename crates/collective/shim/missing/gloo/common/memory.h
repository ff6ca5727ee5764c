// Debian's libgloo-dev leaves out this header of gloo's, which its own gloo/transport/tcp/context.h
// includes. Looked for after all others, so that a complete installation is not touched.
//
// Only what the layout of gloo's classes needs: every function over these is in the library, and
// one that were not would fail to link.

#pragma once

#include <memory>

namespace gloo {

template <typename T>
class NonOwningPtr;

template <typename T>
class WeakNonOwningPtr;

// The owner's: one std::shared_ptr.
template <typename T>
class ShareableNonOwningPtr final {
 public:
  explicit ShareableNonOwningPtr(T *owner);
  ShareableNonOwningPtr(const ShareableNonOwningPtr &) = delete;
  ShareableNonOwningPtr &operator=(const ShareableNonOwningPtr &) = delete;
  ~ShareableNonOwningPtr();

 protected:
  std::shared_ptr<T> ptr_;
};

// The others': one std::weak_ptr.
template <typename T>
class WeakNonOwningPtr final {
 public:
  WeakNonOwningPtr();
  explicit WeakNonOwningPtr(const ShareableNonOwningPtr<T> &owner);

 protected:
  std::weak_ptr<T> ptr_;
};

} // namespace gloo
