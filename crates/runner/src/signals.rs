//! Signals that ask a run to save and end: SIGINT, SIGTERM, SIGUSR1.
//!
//! The first one is noted; the ranks agree on it between two batches, save, and end with
//! [`EXIT_CODE`]. A second one ends this process at once, with 128 and the signal's number.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag;

use crate::{Error, Result};

/// Exit code of a run that a signal ended, after its checkpoint: sysexits' `EX_TEMPFAIL`, try again.
pub const EXIT_CODE: u8 = 75;

struct Noted {
    any: Arc<AtomicBool>,
    which: Arc<AtomicUsize>,
}

static NOTED: OnceLock<Noted> = OnceLock::new();

/// From now on the signals are noted, instead of ending this process, and the [`Runner`](crate::Runner)
/// looks for them. Every rank of a run does it, or none: the ranks agree on what they have noted.
///
/// # Errors
///
/// [`Error::Io`] if the system refuses.
pub fn catch() -> Result<()> {
    if are_caught() {
        return Ok(());
    }
    let noted = Noted { any: Arc::default(), which: Arc::default() };
    let fail = |source| Error::Io { what: "cannot catch signals".into(), source };
    for signal in [SIGINT, SIGTERM, SIGUSR1] {
        // In this order: the first does nothing until the third has seen a signal.
        let any = Arc::clone(&noted.any);
        flag::register_conditional_shutdown(signal, 128 + signal, any).map_err(fail)?;
        let which = Arc::clone(&noted.which);
        flag::register_usize(signal, which, usize::try_from(signal).unwrap_or(0)).map_err(fail)?;
        flag::register(signal, Arc::clone(&noted.any)).map_err(fail)?;
    }
    let _ = NOTED.set(noted);
    Ok(())
}

/// Whether [`catch`] was called.
pub(crate) fn are_caught() -> bool {
    NOTED.get().is_some()
}

/// Number of the signal noted, 0 for none.
pub(crate) fn pending() -> u8 {
    // Relaxed: nothing else is published with it.
    let which = NOTED.get().map_or(0, |noted| noted.which.load(Ordering::Relaxed));
    u8::try_from(which).unwrap_or(0)
}
