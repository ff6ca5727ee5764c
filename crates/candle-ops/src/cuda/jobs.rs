//! The arguments of the kernels: structs with the layout of those in the `.cu` files, 0 where a
//! launch does not use a field.

/// An argument of a kernel.
///
/// # Safety
///
/// The type must be words of 8 bytes without padding.
pub(super) unsafe trait Job: Sized {
    /// The words in memory.
    fn words(&self) -> &[u64] {
        // SAFETY: the trait's contract.
        unsafe {
            std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>() / 8)
        }
    }
}

/// A size of a tensor that a kernel supports.
///
/// # Panics
///
/// If it has more than 32 bits.
pub(super) fn u32_of(size: usize) -> u32 {
    u32::try_from(size).expect("`supports` is false for tensors of 2^31 elements or more")
}

macro_rules! jobs {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty,)* })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, Default)]
            #[repr(C)]
            pub(super) struct $name {
                $(pub(super) $field: $type,)*
            }

            const _: () = {
                assert!(size_of::<$name>() == 0 $(+ size_of::<$type>())*, "no padding");
                assert!(size_of::<$name>() % 8 == 0 && align_of::<$name>() == 8, "whole words");
            };

            // SAFETY: just asserted.
            unsafe impl Job for $name {}
        )*

        /// C++ that compiles after the kernels only if their structs have these layouts.
        #[cfg(test)]
        fn assertions() -> String {
            let mut lines = Vec::new();
            $(
                lines.push(format!("sizeof({0}) == {1}", stringify!($name), size_of::<$name>()));
                $(
                    let field = (stringify!($name), stringify!($field));
                    let offset = std::mem::offset_of!($name, $field);
                    lines.push(format!("__builtin_offsetof({}, {}) == {offset}", field.0, field.1));
                    let size = size_of::<$type>();
                    lines.push(format!("sizeof({}::{}) == {size}", field.0, field.1));
                )*
            )*
            let line = |condition| format!("static_assert({condition}, \"jobs.rs\");\n");
            lines.into_iter().map(line).collect()
        }
    };
}
jobs! {
    /// `y = f(a, b)` for `count` elements.
    MapJob { a: u64, b: u64, y: u64, count: u64, }
    /// Adds a row of biases to each of `rows` rows, or, with `channels`, one bias to each row.
    BiasJob { y: u64, bias: u64, rows: u32, count: u32, channels: u32, unused: u32, }
    AddRowsJob { a: u64, b: u64, y: u64, rows: u32, count: u32, }
    /// Image normalization; `by` are means, then deviations.
    BytesJob {
        x: u64, y: u64, by: u64,
        planes: u32, pixels: u32, channels: u32, unused: u32,
    }
    /// Images and their columns; `per_image` and `per_tap` are strides.
    ColumnsJob {
        x: u64, columns: u64, per_image: u64, per_tap: u64,
        images: u32, channels: u32, height: u32, width: u32, out_height: u32, out_width: u32,
        kernel_height: u32, kernel_width: u32, stride: u32, padding: u32,
    }
    NormJob {
        x: u64, y: u64, dy: u64, dx: u64, gamma: u64, beta: u64, mean: u64, var: u64,
        dgamma: u64, dbeta: u64, along: u64, bits: u64, part: u64, arrived: u64, running_mean: u64, running_var: u64,
        images: u32, channels: u32, pixels: u32, parts: u32, eps: f32, relu: u32, momentum: f32, factor: f32,
    }
    TrackJob {
        mean: u64, var: u64, batch_mean: u64, batch_var: u64,
        channels: u32, momentum: f32, factor: f32, unused: u32,
    }
    PoolJob {
        x: u64, y: u64, taken: u64,
        planes: u32, height: u32, width: u32, out_height: u32, out_width: u32,
        kernel: u32, stride: u32, padding: u32, channels: u32, unused: u32,
    }
    MeanJob { x: u64, y: u64, planes: u32, pixels: u32, channels: u32, unused: u32, }
    TransposeJob { x: u64, y: u64, count: u32, rows: u32, columns: u32, unused: u32, }
    SoftmaxJob { x: u64, y: u64, dy: u64, rows: u32, count: u32, seen: u32, team: u32, }
    LayerNormJob {
        x: u64, y: u64, half: u64, dy: u64, dx: u64, gamma: u64, beta: u64, lines: u64, part: u64,
        rows: u32, count: u32, eps: f32, team: u32,
    }
    ColumnSumsJob {
        x: u64, dy: u64, lines: u64, part: u64,
        rows: u32, count: u32, parts: u32, unused: u32,
    }
    /// `y = f(a, b)` for rows of `count` elements, and sums of the columns of `y`.
    SummedJob {
        a: u64, b: u64, y: u64, part: u64,
        rows: u32, count: u32, parts: u32, unused: u32,
    }
    FoldJob { part: u64, sum: u64, dot: u64, count: u32, parts: u32, }
    LossJob {
        x: u64, labels: u64, y: u64, dy: u64, dx: u64, lines: u64, guess: u64, guessed: u64,
        part: u64, arrived: u64,
        rows: u32, count: u32,
    }
    EmbeddingJob {
        ids: u64, table: u64, rows: u64, ends: u64,
        count: u32, width: u32, padding: u32, unused: u32,
    }
    /// An operand of attention: strides between heads, samples and rows, and the width of rows.
    Operand { at: u64, head: u32, step: u32, line: u32, depth: u32, }
    AttentionJob {
        q: Operand, k: Operand, v: Operand, y: Operand,
        dy: Operand, dq: Operand, dk: Operand, dv: Operand,
        lse: u64, delta: u64, hidden: u64, dropped: u64,
        heads: u32, samples: u32, queries: u32, keys: u32, seen: u32, scale: f32,
        hidden_sample: u32, hidden_head: u32, hidden_query: u32, line: u32, group: u32, pairs: u32,
        keep: f32, unused: u32,
    }
    /// The random words of a kernel's elements, and the probability.
    Draws {
        key0: u64, key1: u64, key2: u64, key3: u64, base: u64, position: u64, end: u32, keep: f32,
    }
    DropoutJob { x: u64, y: u64, count: u64, draws: Draws, }
    DroppedJob {
        draws: Draws, bits: u64, rows: u64, keys: u32, line: u32, seen: u32, unused: u32,
    }
    HiddenJob { mask: u64, bits: u64, rows: u64, keys: u32, line: u32, }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn sizes_are_never_cut_to_32_bits() {
        assert_eq!(u32_of(u32::MAX as usize), u32::MAX);
        assert!(std::panic::catch_unwind(|| u32_of(1 << 32)).is_err());
    }

    /// With the host's C++ compiler, as the fake GPU compiles the kernels.
    #[test]
    #[ignore = "needs a C++ compiler and this repository: .ci/devices"]
    fn jobs_have_the_layout_of_the_kernels_structs() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../cuda-rt/src");
        let read = |name: &str| std::fs::read_to_string(format!("{folder}/{name}")).unwrap();
        let kernels = [read("shim.h"), read("device.h"), super::super::SOURCE.to_owned()].concat();
        let file = std::env::temp_dir().join(format!("jobs-{}.cc", std::process::id()));
        let compiles = |assertions: &str| {
            std::fs::write(&file, kernels.clone() + assertions).unwrap();
            let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
            let mut command = Command::new(compiler);
            command.args(["-std=c++17", "-fsyntax-only", "-w", "-DTYPE=F32"]).arg(&file);
            let output = command.output().unwrap();
            (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
        };
        let (right, errors) = compiles(&assertions());
        let (moved, other) = compiles(&assertions().replace("(LossJob, y)", "(LossJob, dy)"));
        std::fs::remove_file(&file).unwrap();
        assert!(right, "{errors}");
        assert!(!moved && other.contains("static assertion failed"), "{other}");
    }
}
