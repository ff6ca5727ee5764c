//! Registries for `[model]` and `[model_wrapper_cfg]`.

use collective::reducer::ReducerOptions;
use collective::reducer::{CommHook, PowerSgd};

use super::{DistributedDataParallel, ModelFactory, WrapperFactory};
use crate::Result;
use crate::config::Section;
use crate::registry::Registry;

/// Models that a configuration can name in `[model]`; all are registered by the program.
pub static MODELS: Registry<ModelFactory> = Registry::new("model");

/// Wrappers that a configuration can name in `[model_wrapper_cfg]`, including MMEngine's names.
pub static MODEL_WRAPPERS: Registry<WrapperFactory> = Registry::with(
    "model wrapper",
    &[
        ("DistributedDataParallel", |section| build(section, DistributedDataParallel::new)),
        ("MMDistributedDataParallel", |section| build(section, DistributedDataParallel::new)),
        ("MMSeparateDistributedDataParallel", |section| {
            build(section, DistributedDataParallel::separate)
        }),
    ],
);

const MIB: usize = 1 << 20;

type New = fn(
    collective::ProcessGroup,
    &[crate::engine::TensorSpec],
    ReducerOptions,
) -> train_step::Result<DistributedDataParallel>;

fn build(section: &mut Section, new: New) -> Result<WrapperFactory> {
    let mut options = ReducerOptions::default();
    options.find_unused_parameters =
        section.or("find_unused_parameters", options.find_unused_parameters)?;
    options.static_graph = section.or("static_graph", options.static_graph)?;
    options.comm_hook = comm_hook(section)?;
    let broadcast_buffers = section.or("broadcast_buffers", false)?;
    // A gradient is stored only in its bucket; `false` would ask for a copy.
    section.or_checked("gradient_as_bucket_view", true, "true", |view| *view)?;
    // As in PyTorch, a given size also applies to the first bucket.
    let default = (options.bucket_bytes / MIB) as f64;
    if section.has("bucket_cap_mb") {
        let mib = section.or_checked("bucket_cap_mb", default, "positive", |mib| *mib > 0.0)?;
        let bytes = ((mib * MIB as f64) as usize).max(1);
        (options.first_bucket_bytes, options.bucket_bytes) = (bytes, bytes);
    }
    Ok(Box::new(move |group, params| {
        let wrapper = new(group.clone(), params, options)?;
        Ok(Box::new(match broadcast_buffers {
            true => wrapper.with_broadcast_buffers(group),
            false => wrapper,
        }))
    }))
}

/// Reads `comm_hook`: a name such as `"fp16_compress"`, or a table of PowerSGD's options by
/// PyTorch's names.
fn comm_hook(section: &mut Section) -> Result<CommHook> {
    let key = "comm_hook";
    if !section.has(key) || section.is_string(key) {
        let hooks = [
            ("allreduce", CommHook::AllReduce),
            ("fp16_compress", CommHook::Fp16Compress),
            ("bf16_compress", CommHook::Bf16Compress),
            ("powerSGD", CommHook::PowerSgd(PowerSgd::default())),
        ];
        return section.choice(key, "allreduce", &hooks);
    }
    let mut table = section.section(key)?;
    table.choice("type", "powerSGD", &[("powerSGD", ())])?;
    let mut power = PowerSgd::default();
    power.rank = table.count("matrix_approximation_rank", power.rank)?;
    power.min_compression_rate = table.or("min_compression_rate", power.min_compression_rate)?;
    power.error_feedback = table.or("use_error_feedback", power.error_feedback)?;
    power.warm_start = table.or("warm_start", power.warm_start)?;
    let least = if power.error_feedback || power.warm_start { 2 } else { 0 };
    power.start_iter = table.or_checked(
        "start_powerSGD_iter",
        power.start_iter,
        "at least 2 with error feedback or warm start",
        |start| *start >= least,
    )?;
    table.finish()?;
    Ok(CommHook::PowerSgd(power))
}

#[cfg(test)]
mod tests {
    use super::MODEL_WRAPPERS;
    use crate::config::Config;

    fn error(text: &str) -> String {
        let section = Config::from_text("c.toml", text).unwrap().into_section();
        let built = MODEL_WRAPPERS.build_or(section, "MMDistributedDataParallel");
        built.err().map(|e| e.to_string()).unwrap_or_default()
    }

    #[test]
    fn options_are_read_and_errors_name_the_key() {
        let whole = "find_unused_parameters = true
            static_graph = true
            broadcast_buffers = true
            gradient_as_bucket_view = true
            bucket_cap_mb = 4
            comm_hook = { matrix_approximation_rank = 2, start_powerSGD_iter = 10,
                          min_compression_rate = 3, use_error_feedback = true, warm_start = false }";
        for text in ["", whole, "type = 'MMSeparateDistributedDataParallel'"] {
            assert_eq!(error(text), "");
        }
        for (text, wanted) in [
            ("type = 'MyDDP'", "unknown model wrapper `MyDDP`"),
            ("find_unused_paramaters = true", "did you mean `find_unused_parameters`?"),
            ("gradient_as_bucket_view = false", "`gradient_as_bucket_view` must be true"),
            ("comm_hook = 'fp16_compres'", "did you mean `fp16_compress`?"),
            ("comm_hook = { rank = 2 }", "unknown key `rank`"),
            ("comm_hook = { start_powerSGD_iter = 1 }", "must be at least 2 with error feedback"),
            ("bucket_cap_mb = 0", "must be positive"),
        ] {
            let error = error(text);
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }
}
