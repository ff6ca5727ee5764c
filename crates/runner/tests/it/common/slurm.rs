//! A Slurm cluster of two nodes on this machine for the time of a test. Needs Slurm and root.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use parking_lot::{Mutex, MutexGuard};

static ONE: Mutex<()> = Mutex::new(());

/// A cluster, shut down when dropped.
pub(crate) struct Cluster {
    dir: PathBuf,
    _one: MutexGuard<'static, ()>,
}

impl Cluster {
    /// Starts the cluster, of which a process has at most one, with more options of
    /// `tests/testbed/slurm-up.sh`.
    pub(crate) fn start(more: &[&str]) -> Self {
        let one = ONE.lock();
        let id = std::process::id();
        let dir = PathBuf::from(format!("/run/slurm-test-{id}"));
        // Three ports below the ephemeral range; other processes may have their own clusters.
        let port = (17_100 + id % 4000 * 3).to_string();
        let mut up = Command::new(testbed("slurm-up.sh"));
        up.args(["--nodes", "2", "--cpus", "4", "--etc-hosts", "--base-port", &port]).args(more);
        let output = up.arg("--dir").arg(&dir).stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let cluster = Self { dir, _one: one };
        assert!(output.status.success(), "{said}");
        cluster
    }

    /// Value of `SLURM_CONF`.
    pub(crate) fn conf(&self) -> String {
        self.dir.join("slurm.conf").display().to_string()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        drop(Command::new(testbed("slurm-down.sh")).arg("--dir").arg(&self.dir).status());
    }
}

fn testbed(script: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/testbed").join(script)
}
