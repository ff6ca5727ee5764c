//! Calls that fail when they are told to: every one of the safe layer's, once, and nothing is lost
//! or freed too early by it.

use npu_sys::safe::{Buffer, Context, Event, Stream};

use super::*;

/// A program that uses everything; what it returns is the first failure.
fn program() -> Result<Vec<u8>> {
    let context = Context::new(acl(), 0)?;
    let (first, second) = (Stream::new(&context)?, Stream::new(&context)?);
    let (from, to) = (Buffer::new(&context, 64)?, Buffer::new(&context, 64)?);
    let event = Event::new(&context)?;
    first.upload(&from, 0, &[7; 64])?;
    event.record(&first)?;
    event.wait(&second)?;
    second.copy((&to, 0), (&from, 0), 64)?;
    second.fill(&to, 0, 32, 1)?;
    let mut bytes = vec![0; 64];
    second.download(&to, 0, &mut bytes)?;
    first.synchronize()?;
    assert!(event.is_complete()?);
    Ok(bytes)
}

#[test]
fn whichever_call_fails_the_failure_is_told_and_nothing_is_used_after_its_end() {
    let functions: Vec<&str> = Acl::SYMBOLS.iter().map(|symbol| symbol.name).collect();
    let sim = session();
    assert_eq!(program().unwrap()[31..33], [1, 7]);
    let calls: Vec<usize> = functions.iter().map(|function| sim.calls(function)).collect();
    assert_eq!(sim.finish(), [""; 0]);
    let mut tried = 0;
    for (function, calls) in functions.iter().zip(calls) {
        for nth in 1..=calls {
            let sim = session();
            sim.fail(function, nth, 500_000);
            let outcome = program();
            // An object whose destruction failed is still there when its context ends.
            let left =
                |what: &String| function.contains("Destroy") && what.contains("context ends");
            let broken: Vec<_> = sim.violations().into_iter().filter(|what| !left(what)).collect();
            assert_eq!(broken, [""; 0], "{function}, call {nth}");
            // The query of the context to restore later, and destructors, report no errors.
            let told = !function.contains("GetCurrentContext")
                && !["Destroy", "Free", "WithTimeout"].iter().any(|word| function.contains(word));
            match outcome {
                Err(error) => {
                    let text = error.to_string();
                    assert!(text.contains(function) && text.contains("500000"), "{text}");
                }
                Ok(_) => {
                    assert!(!told || *function == "aclrtSetCurrentContext", "{function} {nth}");
                }
            }
            tried += 1;
            // Some of it is leaked on purpose: it may be in use.
            drop(sim.finish());
        }
    }
    assert!(tried > 30, "{tried}");
}

#[test]
fn a_fault_comes_at_the_call_that_was_named_and_once() {
    let sim = session();
    on_device(0);
    sim.fail("aclrtMalloc", 2, 207_001);
    let first = malloc(8);
    let mut address = ptr::null_mut();
    let policy = AclrtMemMallocPolicy::HUGE_FIRST;
    // SAFETY: writes to a local.
    assert_eq!(code(unsafe { acl().aclrtMalloc(&raw mut address, 8, policy) }), 207_001);
    free(first);
    free(malloc(8));
    assert_eq!((sim.calls("aclrtMalloc"), sim.calls_of(|name| name.contains("Malloc"))), (3, 3));
    assert_eq!(sim.finish(), [""; 0]);
}
