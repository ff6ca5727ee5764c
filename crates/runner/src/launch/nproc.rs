//! How many ranks a machine takes, in torchrun's words.

use std::num::NonZero;

/// The number that `text` means: a number, `cpu` for as many as processors, `gpu` for as many as
/// devices (`CUDA_VISIBLE_DEVICES`, otherwise NVIDIA's device files), or `auto`, which is `gpu` where
/// there are devices and `cpu` elsewhere.
///
/// # Errors
///
/// What is wrong with `text`.
pub fn nproc_per_node(text: &str) -> Result<usize, String> {
    parse(text, devices())
}

fn parse(text: &str, devices: usize) -> Result<usize, String> {
    let processors = || std::thread::available_parallelism().map_or(1, NonZero::get);
    match (text, devices) {
        ("gpu", 0) => Err("`gpu`: no device is visible here".to_owned()),
        ("gpu", devices) | ("auto", devices @ 1..) => Ok(devices),
        ("cpu" | "auto", _) => Ok(processors()),
        _ => match text.parse() {
            Ok(count @ 1..) => Ok(count),
            _ => Err(format!("`{text}` is neither a number from 1 on nor auto, gpu or cpu")),
        },
    }
}

fn devices() -> usize {
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => {
            let devices = list.split(',').map(str::trim);
            devices.take_while(|device| !device.is_empty() && *device != "-1").count()
        }
        Err(_) => std::fs::read_dir("/dev").map_or(0, |entries| {
            let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
            names.filter(|name| is_device(name)).count()
        }),
    }
}

/// `nvidia0`, and not `nvidiactl`.
fn is_device(name: &str) -> bool {
    name.strip_prefix("nvidia")
        .is_some_and(|index| !index.is_empty() && index.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torchruns_words() {
        let processors = parse("cpu", 3).unwrap();
        assert!(processors >= 1);
        assert_eq!(parse("4", 0), Ok(4));
        assert_eq!((parse("gpu", 3), parse("auto", 3)), (Ok(3), Ok(3)));
        assert_eq!(parse("auto", 0), Ok(processors));
        for text in ["gpu", "0", "-1", "", "many"] {
            assert!(parse(text, 0).is_err(), "{text}");
        }
        assert!(is_device("nvidia0") && !is_device("nvidiactl") && !is_device("nvidia"));
    }
}
