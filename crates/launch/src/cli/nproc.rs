//! Number of ranks of a node: torchrun's values of `--nproc-per-node`.

use std::num::NonZero;

use collective::init::Accelerator;

/// Parses `--nproc-per-node`: a number; `cpu` for the number of processors; `gpu` for the number of
/// CUDA devices, or of NPUs if there are none; `npu` for the number of NPUs; `auto` for `gpu` if
/// there are devices and `cpu` otherwise.
///
/// The devices are those that `CUDA_VISIBLE_DEVICES` and `ASCEND_RT_VISIBLE_DEVICES` show,
/// otherwise all that have a file of their driver. A GPU that is divided by MIG counts once for
/// each compute instance. WSL has one file for all GPUs of NVIDIA, which counts as one.
///
/// # Errors
///
/// Returns the reason if `text` is invalid.
pub fn nproc_per_node(text: &str) -> Result<usize, String> {
    let files = Files::of_this_host();
    let count = |kind: Accelerator| {
        let visible = std::env::var(kind.variable()).ok();
        files.devices(kind, visible.as_deref())
    };
    let devices = match text {
        "npu" => count(Accelerator::Npu),
        _ => match count(Accelerator::Cuda) {
            0 => count(Accelerator::Npu),
            devices => devices,
        },
    };
    parse(text, devices)
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

/// Names of files by which drivers show their devices.
#[derive(Debug, Default)]
struct Files {
    /// In `/dev`.
    dev: Vec<String>,
    /// MIG's compute instances in `/proc/driver/nvidia/capabilities`: `gpu0/mig/gi1/ci0`.
    instances: Vec<String>,
    /// In `/usr/lib/wsl/lib`: libraries of Windows' driver.
    wsl: Vec<String>,
}

impl Files {
    fn of_this_host() -> Self {
        let capabilities = "/proc/driver/nvidia/capabilities";
        let mut instances = Vec::new();
        for gpu in names(capabilities) {
            for gi in names(&format!("{capabilities}/{gpu}/mig")) {
                let cis = names(&format!("{capabilities}/{gpu}/mig/{gi}"));
                let cis = cis.into_iter().filter(|ci| is_device(ci, "ci"));
                instances.extend(cis.map(|ci| format!("{gpu}/mig/{gi}/{ci}")));
            }
        }
        Self { dev: names("/dev"), instances, wsl: names("/usr/lib/wsl/lib") }
    }

    /// Returns the number of devices of a kind, of which its variable makes `visible` visible.
    fn devices(&self, kind: Accelerator, visible: Option<&str>) -> usize {
        let of = |driver| move |name: &&String| is_device(name, driver);
        let gpus: Vec<_> = self.dev.iter().filter(of("nvidia")).collect();
        match (visible, kind) {
            (Some(list), Accelerator::Cuda) => shown_gpus(list, gpus.len()),
            (Some(list), _) => kind.shown(list),
            (None, Accelerator::Cuda) if gpus.is_empty() => self.gpus_of_wsl(),
            (None, Accelerator::Cuda) => gpus.into_iter().map(|gpu| self.instances(gpu)).sum(),
            (None, _) => self.dev.iter().filter(of("davinci")).count(),
        }
    }

    /// Returns the number of compute instances of a GPU; 1 if MIG does not divide it.
    fn instances(&self, gpu: &str) -> usize {
        let own = format!("{}/", gpu.replace("nvidia", "gpu"));
        self.instances.iter().filter(|path| path.starts_with(&own)).count().max(1)
    }

    /// All GPUs are behind one file there, also those of other vendors.
    fn gpus_of_wsl(&self) -> usize {
        let has = |names: &[String], name| names.iter().any(|found| found == name);
        usize::from(has(&self.dev, "dxg") && has(&self.wsl, "libcuda.so.1"))
    }
}

/// Returns the number of GPUs that a list shows, of `count` GPUs; 0 if that is not known. As for
/// torchrun, the list ends before the first index of no GPU.
fn shown_gpus(list: &str, count: usize) -> usize {
    let shown = Accelerator::Cuda.shown(list);
    let is_absent = |token: &str| token.trim().parse::<usize>().is_ok_and(|gpu| gpu >= count);
    let end = list.split(',').take(shown).position(is_absent);
    end.filter(|_| count > 0).unwrap_or(shown)
}

/// Returns the names in a folder; none if it cannot be read.
fn names(folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
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

    fn count(kind: Accelerator, files: &str, visible: Option<&str>) -> usize {
        let named = |part: usize| {
            let names = files.split('|').nth(part).unwrap_or_default().split_whitespace();
            names.map(str::to_owned).collect()
        };
        let files = Files { dev: named(0), instances: named(1), wsl: named(2) };
        files.devices(kind, visible)
    }

    #[test]
    fn devices_are_counted_by_the_files_of_their_drivers() {
        let cuda = |files: &str| count(Accelerator::Cuda, files, None);
        assert_eq!(cuda("null nvidia0 nvidia1 nvidia10 nvidiactl nvidia-uvm nvidia-caps"), 3);
        assert_eq!(cuda("null davinci0 dxg"), 0);
        assert_eq!(count(Accelerator::Npu, "davinci0 davinci7 davinci_manager nvidia0", None), 2);
        // MIG: GPU 0 has three compute instances, GPU 1 none, and GPU 10 one.
        let dev = "nvidia0 nvidia1 nvidia10 nvidiactl";
        let migs = "gpu0/mig/gi1/ci0 gpu0/mig/gi1/ci1 gpu0/mig/gi9/ci0 gpu10/mig/gi0/ci0";
        assert_eq!(cuda(&format!("{dev}|{migs}")), 5);
        // WSL: one file for all GPUs, of any vendor.
        assert_eq!(cuda("null dxg||libcuda.so.1 libd3d12.so"), 1);
        assert_eq!(cuda("null dxg||libd3d12.so"), 0);
    }

    #[test]
    fn a_list_of_visible_devices_is_counted_as_torchrun_does() {
        let (two, wsl) = ("nvidia0 nvidia1|gpu0/mig/gi1/ci0 gpu0/mig/gi2/ci0", "dxg||libcuda.so.1");
        for (list, with_two, on_wsl) in [
            ("", 0, 0),
            ("1", 1, 1),
            ("1,0", 2, 2),
            ("0, 1,2", 2, 3),
            ("2,0", 0, 2),
            ("0,-1,1", 1, 1),
            ("0,0", 0, 0),
            ("GPU-8932f937,GPU-12345678", 2, 2),
            ("MIG-8932f937,MIG-12345678", 2, 2),
        ] {
            let count = |files: &str| count(Accelerator::Cuda, files, Some(list));
            assert_eq!((count(two), count(wsl)), (with_two, on_wsl), "{list:?}");
        }
    }
}
