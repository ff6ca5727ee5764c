//! Limit of vector instructions that are chosen at run time: `GRADSTACK_SIMD` in the environment.
//!
//! The other crates that choose have a link to this file.

use std::sync::OnceLock;

/// Vector instructions, the narrowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Simd {
    /// Those of every processor of the build's target.
    Scalar,
    Avx2,
    Avx512,
}

/// Returns whether these may be used, if the processor has them. Reads the environment once.
///
/// # Panics
///
/// If `GRADSTACK_SIMD` is set to something else than `scalar`, `avx2` or `avx512`.
pub(crate) fn allows(simd: Simd) -> bool {
    static LIMIT: OnceLock<Simd> = OnceLock::new();
    let limit = LIMIT.get_or_init(|| match std::env::var_os("GRADSTACK_SIMD") {
        Some(value) => parse(&value.to_string_lossy()),
        None => Simd::Avx512,
    });
    simd <= *limit
}

fn parse(value: &str) -> Simd {
    match value {
        "scalar" => Simd::Scalar,
        "avx2" => Simd::Avx2,
        "avx512" => Simd::Avx512,
        _ => panic!("GRADSTACK_SIMD is `{value}`: it must be `scalar`, `avx2` or `avx512`"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_ordered_by_width() {
        let all = ["scalar", "avx2", "avx512"].map(parse);
        assert!(all.is_sorted() && all[0] < all[1] && all[1] < all[2]);
    }

    #[test]
    #[should_panic(expected = "GRADSTACK_SIMD is `AVX2`: it must be `scalar`, `avx2` or `avx512`")]
    fn another_value_is_refused() {
        parse("AVX2");
    }

    /// The gate runs this with each value.
    #[test]
    fn the_environment_limits_what_is_used() {
        let value = std::env::var("GRADSTACK_SIMD").unwrap_or_else(|_| "avx512".to_owned());
        let used = [Simd::Scalar, Simd::Avx2, Simd::Avx512].into_iter().rfind(|s| allows(*s));
        assert_eq!(used, Some(parse(&value)));
    }
}
