//! Two processes of the example: the same file after a kill.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

fn example(name: &str) -> PathBuf {
    // Beside the folder that this test is in.
    let test = std::env::current_exe().unwrap();
    test.parent().unwrap().parent().unwrap().join("examples").join(name)
}

/// Two ranks of the example, which are killed when this is dropped.
struct Ranks([Child; 2]);

impl Ranks {
    fn start(dir: &Path) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Self([0, 1].map(|rank: usize| {
            Command::new(example("trainer"))
                .current_dir(dir)
                .envs([("RANK", rank.to_string()), ("WORLD_SIZE", "2".to_owned())])
                .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port.to_string())])
                .env("OMP_NUM_THREADS", "1")
                .stdout(Stdio::piped())
                .spawn()
                .unwrap()
        }))
    }

    /// The lines that rank 0 prints, until one has this beginning.
    fn lines(&mut self, until: &str) -> Vec<String> {
        let mut lines = Vec::new();
        for line in BufReader::new(self.0[0].stdout.take().unwrap()).lines() {
            lines.push(line.unwrap());
            if lines[lines.len() - 1].starts_with(until) {
                break;
            }
        }
        lines
    }

    /// Waits for both to end well.
    fn wait(mut self) {
        let deadline = Instant::now() + Duration::from_secs(120);
        for rank in &mut self.0 {
            let status = loop {
                if let Some(status) = rank.try_wait().unwrap() {
                    break status;
                }
                assert!(Instant::now() < deadline, "a rank does not end");
                std::thread::sleep(Duration::from_millis(20));
            };
            assert!(status.success(), "{status}");
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.0 {
            // It may have ended.
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}

#[test]
fn two_ranks_that_are_killed_go_on_to_the_bits_of_an_undisturbed_run() {
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let [whole, parts] = dirs.each_ref().map(tempfile::TempDir::path);
    let mut ranks = Ranks::start(whole);
    let undisturbed = ranks.lines("nothing");
    ranks.wait();
    let mut ranks = Ranks::start(parts);
    let before = ranks.lines("epoch 1");
    drop(ranks);
    let mut ranks = Ranks::start(parts);
    let after = ranks.lines("nothing");
    ranks.wait();
    assert_eq!(before, undisturbed[..2]);
    // An epoch may have been saved that was not printed any more.
    assert!(undisturbed.ends_with(&after) && after.len() <= 4, "{undisturbed:?}, then {after:?}");
    let file = |dir: &Path| std::fs::read(dir.join("points.safetensors")).unwrap();
    assert!(file(whole) == file(parts));
    let loss = |line: &String| line.split([' ', ',']).nth(3).unwrap().parse::<f64>().unwrap();
    assert!(loss(&undisturbed[5]) < 0.8 * loss(&undisturbed[0]), "it learns: {undisturbed:?}");
}
