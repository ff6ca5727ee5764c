//! Number of ranks of a node: torchrun's values of `--nproc-per-node`.

use std::num::NonZero;

use collective::init::Accelerator;

/// Parses `--nproc-per-node`: a number; `cpu` for the number of processors; `gpu` for the number of
/// CUDA devices, or of NPUs if there are none (`CUDA_VISIBLE_DEVICES` and
/// `ASCEND_RT_VISIBLE_DEVICES`, otherwise their drivers' device files); `npu` for the number of
/// NPUs; `auto` for `gpu` if there are devices and `cpu` otherwise.
///
/// # Errors
///
/// Returns the reason if `text` is invalid.
pub fn nproc_per_node(text: &str) -> Result<usize, String> {
    let kinds = [(Accelerator::Cuda, "nvidia"), (Accelerator::Npu, "davinci")];
    let kinds = if text == "npu" { &kinds[1..] } else { &kinds };
    parse(text, kinds.iter().map(devices).find(|&devices| devices > 0).unwrap_or(0))
}

fn parse(text: &str, devices: usize) -> Result<usize, String> {
    let processors = || std::thread::available_parallelism().map_or(1, NonZero::get);
    match (text, devices) {
        ("gpu" | "npu", 0) => Err(format!("`{text}`: no device is visible on this host")),
        ("gpu" | "npu", devices) | ("auto", devices @ 1..) => Ok(devices),
        ("cpu" | "auto", _) => Ok(processors()),
        _ => match text.parse() {
            Ok(count @ 1..) => Ok(count),
            _ => Err(format!("`{text}` is not a positive number, auto, gpu, npu or cpu")),
        },
    }
}

/// Returns the number of visible devices of a kind, whose device files begin with `driver`.
fn devices((kind, driver): &(Accelerator, &str)) -> usize {
    let files = || std::fs::read_dir("/dev").into_iter().flatten().flatten();
    let names = || files().filter_map(|entry| entry.file_name().into_string().ok());
    match std::env::var(kind.variable()) {
        Ok(list) => kind.shown(&list),
        Err(_) => names().filter(|name| is_device(name, driver)).count(),
    }
}

/// Matches `nvidia0`, but not `nvidiactl`.
fn is_device(name: &str, driver: &str) -> bool {
    name.strip_prefix(driver)
        .is_some_and(|index| !index.is_empty() && index.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torchruns_values_are_parsed() {
        let processors = parse("cpu", 3).unwrap();
        assert!(processors >= 1);
        assert_eq!(parse("4", 0), Ok(4));
        assert_eq!([parse("gpu", 3), parse("npu", 3), parse("auto", 3)], [Ok(3), Ok(3), Ok(3)]);
        assert_eq!(parse("auto", 0), Ok(processors));
        for text in ["gpu", "npu", "xpu", "0", "-1", "", "many"] {
            assert!(parse(text, 0).is_err(), "{text}");
        }
        let nvidia = |name| is_device(name, "nvidia");
        assert!(nvidia("nvidia0") && !nvidia("nvidiactl") && !nvidia("nvidia"));
        assert!(is_device("davinci7", "davinci") && !is_device("davinci_manager", "davinci"));
    }
}
