//! The real NCCL without a GPU: its version, its unique ids, and the error of an init without a
//! driver.
//!
//! `COLLECTIVE_REAL_NCCL` is its path, for example after `pip install nvidia-nccl-cu12` (some 300
//! MB). The driver is the fake, whose devices the real NCCL does not find.

#![expect(unsafe_code, reason = "opens NCCL")]

use std::time::Duration;

use collective::nccl::{Config, Libraries, connector};
use collective::{Error, GroupOptions, MemoryStore, ProcessGroup};

use super::fake::Fake;

#[test]
#[ignore = "needs NVIDIA's NCCL, named by COLLECTIVE_REAL_NCCL, and no GPU"]
fn real_nccl_has_a_version_and_ids_without_a_driver() {
    let path = std::env::var_os("COLLECTIVE_REAL_NCCL").expect("the path of a libnccl.so.2");
    let cuda = std::slice::from_ref(&Fake::get().path);
    // SAFETY: the variable names an NCCL; the tests compiled the fake.
    let libraries = unsafe { Libraries::open(&[path.into()], cuda) }.unwrap();
    println!("NCCL {}", libraries.version());
    assert!((21900..40000).contains(&libraries.version()), "{}", libraries.version());
    let ids = [libraries.unique_id().unwrap(), libraries.unique_id().unwrap()];
    assert!(ids[0] != ids[1] && ids[0] != [0; 128]);

    let connect = connector(libraries, Config::default());
    let options = GroupOptions::default().with_timeout(Duration::from_secs(60)).with_cuda_device(0);
    let store = std::sync::Arc::new(MemoryStore::new());
    let error = ProcessGroup::from_store_with(store, 0, 1, options, connect).unwrap_err();
    println!("{error}");
    let Error::Backend { backend: "nccl", name, code: 1, text, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(name, "ncclUnhandledCudaError");
    assert!(text.contains("driver"), "{text}");
}
