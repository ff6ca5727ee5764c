//! Launchers and stores as child processes of a test.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Deadline of all waits, long enough for a busy machine.
pub(crate) const SOON: Duration = Duration::from_secs(120);

/// Collects a launcher's output in the background.
pub(crate) struct Reader {
    lines: Arc<Mutex<Vec<String>>>,
    threads: Vec<JoinHandle<()>>,
}

impl Reader {
    fn new(child: &mut Child) -> Self {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let (out, err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let pipes: [Box<dyn std::io::Read + Send>; 2] = [Box::new(out), Box::new(err)];
        let read = |pipe| {
            let lines = Arc::clone(&lines);
            std::thread::spawn(move || {
                for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                    lines.lock().unwrap().push(line);
                }
            })
        };
        let threads = pipes.into_iter().map(read).collect();
        Self { lines, threads }
    }

    /// Waits until all output is read; not forever, because an escaped process may hold the pipes.
    fn finish(&self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !self.threads.iter().all(JoinHandle::is_finished) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub(crate) fn text(&self) -> String {
        self.lines.lock().unwrap().join("\n")
    }

    /// Waits until `count` lines contain `text`.
    pub(crate) fn await_lines(&self, text: &str, count: usize) {
        let deadline = Instant::now() + SOON;
        while self.lines.lock().unwrap().iter().filter(|line| line.contains(text)).count() < count {
            assert!(Instant::now() < deadline, "not within {SOON:?}: {text}\n{}", self.text());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A launcher process; killed on drop, which also ends its ranks.
pub(crate) struct Launcher {
    pub(crate) child: Child,
    pub(crate) reader: Reader,
}

impl Launcher {
    pub(crate) fn start(command: &mut Command) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let reader = Reader::new(&mut child);
        Self { child, reader }
    }

    /// Waits for the exit code; -1 after a signal.
    pub(crate) fn wait(&mut self) -> i32 {
        let deadline = Instant::now() + SOON;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                self.reader.finish();
                return status.code().unwrap_or(-1);
            }
            assert!(Instant::now() < deadline, "still running:\n{}", self.reader.text());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// A `store` process, killed on drop.
pub(crate) struct StoreProcess {
    pub(crate) child: Child,
    pub(crate) port: u16,
}

impl StoreProcess {
    pub(crate) fn start(mut command: Command, listen: &str) -> Self {
        let mut child = command
            .args(["store", "--listen", listen])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let port = line.trim().rsplit(':').next().and_then(|port| port.parse().ok());
        Self { child, port: port.unwrap_or_else(|| panic!("{line}")) }
    }
}

impl Drop for StoreProcess {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
