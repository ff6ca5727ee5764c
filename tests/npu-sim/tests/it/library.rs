//! The simulator as a library that is opened, in processes of their own.

use std::env;
use std::path::PathBuf;
use std::process::Command;

use npu_sys::LoadError;

use super::*;

/// The library's path: Cargo puts it beside this test.
fn library() -> PathBuf {
    env::current_exe().unwrap().with_file_name("libnpu_sim.so")
}

/// The tables, out of the library.
fn opened() -> std::result::Result<(Acl, Nnop, Ops, Hccl), LoadError> {
    let paths = [library()];
    // SAFETY: the simulator, which is built from the rows of these tables.
    Ok(unsafe {
        (Acl::open(&paths)?, Nnop::open(&paths)?, Ops::open(&paths)?, Hccl::open(&paths)?)
    })
}

#[test]
fn every_row_is_in_the_library() {
    let (acl, ..) = opened().unwrap();
    let found = npu_sys::probe_with(&acl).unwrap();
    assert_eq!(found.to_string(), "8 x Ascend910B2, AscendCL 1.14.0");
    for name in [Acl::SYMBOLS, Nnop::SYMBOLS, Ops::SYMBOLS, Hccl::SYMBOLS].concat() {
        assert!(npu_sim::symbol(name.name).is_some(), "{}", name.name);
    }
    assert!(npu_sim::symbol("aclnnNothing").is_none());
}

/// One rank of the test below; the environment says which, and where the ranks meet.
#[test]
fn rank_of_processes() {
    let Ok(rank) = env::var("NPU_SIM_TEST_RANK") else { return };
    let (rank, file) = (rank.parse::<u32>().unwrap(), env::var_os("NPU_SIM_TEST_INFO").unwrap());
    let (acl, _, _, hccl) = opened().unwrap();
    // SAFETY: the simulator's functions with what they ask for, throughout.
    unsafe {
        acl.aclInit(ptr::null()).unwrap();
        acl.aclrtSetDevice(0).unwrap();
        let mut info = HcclRootInfo { internal: [0; 4108] };
        if rank == 0 {
            hccl.HcclGetRootInfo(&raw mut info).unwrap();
            let partial = PathBuf::from(&file).with_extension("partial");
            std::fs::write(&partial, info.internal).unwrap();
            std::fs::rename(partial, &file).unwrap();
        } else {
            while !PathBuf::from(&file).exists() {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            info.internal.copy_from_slice(&std::fs::read(&file).unwrap());
        }
        let (mut comm, mut stream) = (HcclComm::NULL, AclrtStream::NULL);
        hccl.HcclCommInitRootInfo(3, &raw const info, rank, &raw mut comm).unwrap();
        acl.aclrtCreateStream(&raw mut stream).unwrap();
        let mut memory = ptr::null_mut();
        acl.aclrtMalloc(&raw mut memory, 64, AclrtMemMallocPolicy::HUGE_FIRST).unwrap();
        let mut number = 10f32.powi(rank as i32);
        let at = (&raw mut number).cast::<c_void>();
        acl.aclrtMemcpy(memory, 4, at, 4, AclrtMemcpyKind::HOST_TO_DEVICE).unwrap();
        let (f32s, sum) = (HcclDataType::FP32, HcclReduceOp::SUM);
        hccl.HcclAllReduce(memory, memory, 1, f32s, sum, comm, stream).unwrap();
        acl.aclrtSynchronizeStream(stream).unwrap();
        acl.aclrtMemcpy(at, 4, memory, 4, AclrtMemcpyKind::DEVICE_TO_HOST).unwrap();
        assert_eq!(number, 111.0);
        hccl.HcclBarrier(comm, stream).unwrap();
        acl.aclrtSynchronizeStream(stream).unwrap();
        hccl.HcclCommDestroy(comm).unwrap();
    }
}

fn this_test(name: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture"]);
    command
}

#[test]
fn processes_reduce_together() {
    let file = env::temp_dir().join(format!("npu-sim-{}", std::process::id()));
    drop(std::fs::remove_file(&file));
    let ranks: Vec<_> = (0..3)
        .map(|rank| {
            let mut command = this_test("library::rank_of_processes");
            command.env("NPU_SIM_TEST_RANK", rank.to_string()).env("NPU_SIM_TEST_INFO", &file);
            command.spawn().unwrap()
        })
        .collect();
    for mut rank in ranks {
        assert!(rank.wait().unwrap().success());
    }
    std::fs::remove_file(file).unwrap();
}

/// The process that the next test starts with an environment.
#[test]
fn process_of_environment() {
    let Ok(expected) = env::var("NPU_SIM_TEST_EXPECTED") else { return };
    let (acl, ..) = opened().unwrap();
    let said = match npu_sys::probe_with(&acl) {
        Ok(found) => found.to_string(),
        Err(error) => error.to_string(),
    };
    assert_eq!(said, expected);
}

#[test]
fn the_environment_says_what_is_simulated() {
    for (variables, expected) in [
        (
            &[("NPU_SIM_SOC", "Ascend910A"), ("NPU_SIM_DEVICES", "2")][..],
            "2 x Ascend910A, AscendCL 1.14.0",
        ),
        (&[("ASCEND_RT_VISIBLE_DEVICES", "5")], "1 x Ascend910B2, AscendCL 1.14.0"),
        (
            &[("NPU_SIM_FAULT", "aclrtGetDeviceCount:1:507899")],
            "aclrtGetDeviceCount failed: ACL_ERROR_RT_DRV_INTERNAL_ERROR (507899)",
        ),
    ] {
        let mut command = this_test("library::process_of_environment");
        command.envs(variables.iter().copied()).env("NPU_SIM_TEST_EXPECTED", expected);
        assert!(command.status().unwrap().success(), "{variables:?}");
    }
}

/// The process that the next test starts: it must die when it reads a device address.
#[test]
fn process_that_follows_a_devices_address() {
    if env::var_os("NPU_SIM_TEST_FOLLOW").is_none() {
        return;
    }
    let sim = session();
    on_device(0);
    let memory = malloc(8).cast::<u8>();
    // SAFETY: there is none; this is what must not work.
    let byte = unsafe { memory.read_volatile() };
    panic!("{byte} was read from a device by {sim:?}");
}

#[test]
fn a_devices_address_cannot_be_followed() {
    use std::os::unix::process::ExitStatusExt;
    let mut command = this_test("library::process_that_follows_a_devices_address");
    let status = command.env("NPU_SIM_TEST_FOLLOW", "1").status().unwrap();
    assert!(matches!(status.signal(), Some(7 | 11)), "{status}");
}
