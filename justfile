# The commands of a contributor. Each is one line of a shell, for those who have no `just`.

# Formats, lints, checks documentation: what the gate asks of every commit.
check:
    cargo fmt --all --check
    cargo lint
    .ci/doc

# Documents all crates; prints where the book is.
book:
    .ci/doc

# Tests of one crate: `just test collective`.
test crate:
    cargo test -p gradstack-{{crate}} --tests

# Tests of the rules: layering, tidiness, the book beside the code.
rules:
    cargo test -p tests --test it -- tidy:: layering:: book::

# All tests, with all features but candle's CUDA.
test-all:
    cargo test-all --no-fail-fast

# The gate, as on a fresh machine; installs what it needs.
gate:
    .ci/run

# The sweeps of a night, or one of them: `just nightly kills`.
nightly sweep="":
    .ci/nightly {{sweep}}
