//! Gradients on the host, averaged by HCCL: the reducer with `through_device` against the reducer
//! on the host.

use std::time::Duration;

use collective::hccl::Config;
use collective::reducer::{CommHook, Gradient, ParamInfo, PowerSgd};
use collective::{
    DType, Error, GroupOptions, ProcessGroup, Result,
    reducer::{Reducer, ReducerOptions},
};
use half::{bf16, f16};

use super::fake::{finish, play_all};

const COUNTS: [usize; 5] = [7, 0, 33, 1, 40];

fn options(hook: CommHook) -> ReducerOptions {
    let mut options = ReducerOptions::default();
    (options.first_bucket_bytes, options.bucket_bytes) = (64, 128);
    options.comm_hook = hook;
    options
}

fn through(hook: CommHook) -> ReducerOptions {
    let mut options = options(hook);
    options.through_device = true;
    options
}

fn params(dtype: DType) -> Vec<ParamInfo> {
    COUNTS.iter().enumerate().map(|(i, n)| ParamInfo::new(format!("p{i}"), *n, dtype)).collect()
}

/// A rank's gradient of a parameter in a pass.
fn gradient(rank: usize, pass: usize, index: usize) -> Vec<f32> {
    let number = |i| (((rank * 31 + pass * 17 + index * 7 + i) % 23) as f32 - 11.0) * 0.37;
    (0..COUNTS[index]).map(number).collect()
}

/// Averages of several passes: the second only accumulates; the buckets are rebuilt after the
/// first.
fn averages<T: Gradient>(
    group: &ProcessGroup,
    options: ReducerOptions,
    from: impl Fn(f32) -> T,
) -> Result<Vec<Vec<T>>> {
    let mut reducer = Reducer::new(group.clone(), params(T::DTYPE), options)?;
    let mut averages = Vec::new();
    for (pass, sync) in [true, false, true, true].into_iter().enumerate() {
        reducer.prepare(sync)?;
        for index in (0..COUNTS.len()).rev() {
            let gradient: Vec<T> =
                gradient(group.rank(), pass, index).into_iter().map(&from).collect();
            reducer.ready(index, &gradient)?;
        }
        reducer.finish()?;
        if sync {
            averages.extend((0..COUNTS.len()).map(|i| reducer.grad::<T>(i).unwrap().to_vec()));
            reducer.zero_grad();
        }
    }
    Ok(averages)
}

/// Checks that averages on the host and through the device differ by at most `most`.
fn check_close<T: Gradient + Into<f64>>(
    group: &ProcessGroup,
    hook: &CommHook,
    from: fn(f32) -> T,
    most: f64,
) {
    let host = averages(group, options(hook.clone()), from).unwrap();
    let device = averages(group, through(hook.clone()), from).unwrap();
    assert_eq!(host.len(), 3 * COUNTS.len());
    for (host, device) in host.concat().into_iter().zip(device.concat()) {
        let (host, device): (f64, f64) = (host.into(), device.into());
        assert!((host - device).abs() <= most, "{host} on the host, {device} through the device");
    }
}

fn group_options() -> GroupOptions {
    GroupOptions::default().with_timeout(Duration::from_secs(60))
}

#[test]
fn through_device_averages_match_the_host() {
    let session = npu_sim::start(npu_sim::Config::default());
    play_all(2, &group_options(), &Config::default(), |group, _| {
        // Halves of sums are exact; sums in 16 bits are rounded before they are halved, too.
        let calls = |name| session.calls(name);
        let before = calls("HcclAllReduce");
        check_close(&group, &CommHook::AllReduce, |x| x, 0.0);
        assert!(calls("HcclAllReduce") > before, "HCCL was not used");
        check_close(&group, &CommHook::AllReduce, f16::from_f32, 8e-3);
        check_close(&group, &CommHook::AllReduce, bf16::from_f32, 6e-2);
        check_close(&group, &CommHook::Fp16Compress, |x: f32| x, 8e-3);
        let mut finding = through(CommHook::AllReduce);
        finding.find_unused_parameters = true;
        averages(&group, finding, |x| x).unwrap();
    });
    finish(session);
}

#[test]
fn through_device_rejects_power_sgd_f64_and_host_groups() {
    let session = npu_sim::start(npu_sim::Config::default());
    play_all(2, &group_options(), &Config::default(), |group, _| {
        let power = CommHook::PowerSgd(PowerSgd::default());
        let error = averages(&group, through(power), |x| x).unwrap_err().to_string();
        assert!(error.contains("through a device"), "{error}");
        // HCCL does not reduce f64; every rank gets the error.
        let error = averages(&group, through(CommHook::AllReduce), f64::from).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    });
    let hosts = ProcessGroup::threads(1, Duration::from_secs(10)).unwrap();
    let options = through(CommHook::AllReduce);
    let error = Reducer::new(hosts[0].clone(), params(DType::F32), options).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    finish(session);
}

/// One copy fails on one rank, which gets CANN's error; the other ranks do not hang.
#[test]
fn a_failed_copy_fails_the_pass_on_all_ranks() {
    for nth in [1, 4, 9] {
        let session = npu_sim::start(npu_sim::Config::default());
        let errors = play_all(2, &group_options(), &Config::default(), |group, _| {
            group.barrier().unwrap();
            if group.rank() == 0 {
                session.fail("aclrtMemcpy", nth, 507_899);
            }
            let result = averages(&group, through(CommHook::AllReduce), |x| x);
            if let Err(error) = &result {
                group.abort(&error.to_string());
            }
            result.err().map(|error| error.to_string())
        });
        let failed = |e: &Option<String>| e.as_ref().is_some_and(|e| e.contains("507899"));
        assert!(errors.iter().any(failed), "{nth}: {errors:?}");
        assert!(errors.iter().all(Option::is_some), "{nth}: {errors:?}");
        drop(session);
    }
}
