//! Failures of a reducer on device memory, on its rank and on the others.

use collective::reducer::PowerSgd;

use super::*;
use crate::nccl::fake::Fault;

#[test]
fn a_failed_kernel_on_one_rank_fails_all_ranks() {
    let errors = ranks(2, DEADLINE, |group| {
        let rank = group.rank();
        let kernels = Kernels { fails: (rank == 0).then_some(1), ..Kernels::default() };
        let mut side = Side::new(group, params(&[2, 2]), tiny(), kernels);
        side.pass(&[2, 2], true, |_| 1.0);
        wait_for_all_ranks(&side);
        let run = |side: &mut Side<Kernels>| {
            side.reducer.prepare(true)?;
            side.ready(1, vec![1.0_f32; 2])?;
            side.ready(0, vec![1.0_f32; 2])?;
            side.finish()?;
            side.reducer.wait()
        };
        let start = Instant::now();
        let error = loop {
            if let Err(error) = run(&mut side) {
                break error;
            }
            // The average itself may have been in time.
            assert!(start.elapsed() < DEADLINE);
        };
        check_poisoned(&mut side);
        error.to_string()
    });
    assert!(errors[0].contains("cuLaunchKernel"), "{}", errors[0]);
    assert!(errors[1].contains("cuLaunchKernel") && errors[1].contains("rank 0"), "{}", errors[1]);
}

#[test]
fn a_missing_peer_is_named_and_memory_is_released() {
    let errors = ranks(2, Duration::from_millis(1500), |group| {
        let rank = group.rank();
        let mut side = Side::new(group, params(&[2]), tiny(), Kernels::default());
        side.pass(&[2], true, |_| 1.0);
        wait_for_all_ranks(&side);
        if rank == 1 {
            let start = Instant::now();
            while side.reducer.prepare(true).is_ok() {
                assert!(start.elapsed() < DEADLINE);
                std::thread::sleep(Duration::from_millis(5));
            }
            return None;
        }
        side.pass(&[2], true, |_| 1.0);
        let error = side.reducer.wait().unwrap_err();
        check_poisoned(&mut side);
        Some(error)
    });
    let Some(Error::Timeout { missing, .. }) = &errors[0] else { panic!("{errors:?}") };
    assert_eq!(missing, &[1]);
}

/// The device may still use memory after an abort that failed, also if the launch itself failed.
#[test]
fn memory_of_a_failed_launch_is_leaked_if_the_abort_failed() {
    let (devices, options) = (devices(2), GroupOptions::default().with_timeout(DEADLINE));
    let groups = Fake::get().groups(devices.clone(), &options, &Config::default());
    let groups: Vec<_> = groups.into_iter().map(Result::unwrap).collect();
    Fake::get().fault("launch", devices.start + 1, 1, Fault::Return(1));
    Fake::get().fault("ncclCommAbort", devices.start + 1, 1, Fault::Return(3));
    play(groups, |group| {
        let mut options = tiny();
        options.through_device = true;
        let mut reducer = Reducer::new(group, params(&[2]), options).unwrap();
        reducer.prepare(true).unwrap();
        let ended = reducer.ready(0, &[1.0_f32; 2]).and_then(|()| reducer.finish());
        let text = ended.unwrap_err().to_string();
        assert!(text.contains("ncclCommAbort") == (reducer.group().rank() == 1), "{text}");
    });
    for (device, freed) in devices.zip([1, 0]) {
        let calls = |function| Fake::get().calls(function, device);
        assert_eq!((calls("ncclMemAlloc"), calls("ncclMemFree")), (2, 1 + freed));
    }
}

#[test]
fn misuse_is_an_error_and_changes_nothing() {
    ranks(2, DEADLINE, |group| {
        let mut side = Side::new(group.clone(), params(&[2, 2]), tiny(), NoKernels);
        let refused = |result: Result<()>, text: &str| {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
            assert!(error.to_string().contains(text), "{error}");
        };
        refused(side.ready(0, vec![1.0_f32; 2]), "reported before `prepare`");
        refused(side.finish(), "`finish` called before `prepare`");
        side.reducer.prepare(true).unwrap();
        refused(side.ready(9, vec![1.0_f32; 2]), "parameter 9");
        refused(side.ready(0, vec![1.0_f32; 3]), "p0 is f32 [3], the parameter is f32 [2]");
        refused(side.ready(0, vec![1.0_f64; 2]), "p0 is f64 [2]");
        let across = side.reducer.slot(0).address() + 4;
        #[expect(unsafe_code, reason = "an address is only a number")]
        // SAFETY: refused before it is used.
        let across = unsafe { DeviceBuf::from_raw(across, 2, DType::F32) }.unwrap();
        #[expect(unsafe_code, reason = "the reducer's contract")]
        // SAFETY: as above.
        let across = unsafe { side.reducer.ready(0, across, side.stream.raw()) };
        refused(across, "partly overlaps its slot");
        side.stream.capture(true);
        let captured = side.ready(0, vec![1.0_f32; 2]).unwrap_err();
        assert!(matches!(captured, Error::Unsupported { .. }), "{captured}");
        side.stream.capture(false);
        side.ready(0, vec![1.0_f32; 2]).unwrap();
        refused(side.ready(0, vec![1.0_f32; 2]), "second gradient for p0");
        side.ready(1, vec![1.0_f32; 2]).unwrap();
        refused(side.reducer.prepare(true), "`prepare` called before `finish`");
        side.stream.capture(true);
        assert!(matches!(side.finish(), Err(Error::Unsupported { .. })));
        side.stream.capture(false);
        side.finish().unwrap();
        assert_eq!(side.firsts(2), [Some(1.0), Some(1.0)]);
    });
    // Without kernels a gradient cannot be added to an earlier one. The group fails, so it has one
    // rank.
    ranks(1, DEADLINE, |group| {
        let mut side = Side::new(group, params(&[2]), tiny(), NoKernels);
        side.pass(&[2], true, |_| 1.0);
        side.reducer.prepare(true).unwrap();
        let error = side.ready(0, vec![1.0_f32; 2]).unwrap_err();
        assert!(error.to_string().contains("outside of their slots"), "{error}");
    });
    let group = ProcessGroup::threads(1, DEADLINE).unwrap().remove(0);
    let error = DeviceReducer::new(group, params(&[1]), tiny(), NoKernels).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
}

#[test]
fn different_comm_hooks_are_an_error_on_all_ranks() {
    let errors = ranks(2, DEADLINE, |group| {
        let mut options = tiny();
        if group.rank() == 0 {
            options.comm_hook = CommHook::Fp16Compress;
        }
        DeviceReducer::new(group, params(&[1]), options, NoKernels).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("Fp16Compress")), "{errors:?}");
}

#[test]
fn static_graph_and_power_sgd_are_unsupported() {
    ranks(1, DEADLINE, |group| {
        let (mut fixed, mut hooked) = (tiny(), tiny());
        fixed.static_graph = true;
        hooked.comm_hook = CommHook::PowerSgd(PowerSgd::default());
        for (options, named) in [(fixed, "static graph"), (hooked, "PowerSgd")] {
            let made = DeviceReducer::new(group.clone(), params(&[1]), options, NoKernels);
            let error = made.unwrap_err();
            assert!(matches!(error, Error::Unsupported { .. }), "{error}");
            assert!(error.to_string().contains(named), "{error}");
        }
    });
}
