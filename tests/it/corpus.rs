//! Replays the committed corpus of each fuzz target through the function that the target calls.

use std::fs;
use std::path::Path;

#[expect(unreachable_pub, reason = "it is the library of the fuzz targets")]
#[path = "../../fuzz/src/lib.rs"]
mod fuzz;

/// The files in a folder, sorted by name.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn fuzz_targets_accept_their_corpus() {
    let folder = tests::root().join("fuzz/corpus");
    for (target, check) in fuzz::TARGETS {
        let inputs = names(&folder.join(target));
        assert!(!inputs.is_empty(), "{target} has no corpus");
        for input in inputs {
            println!("{target}/{input}");
            check(&fs::read(folder.join(target).join(input)).unwrap());
        }
    }
}

#[test]
fn every_fuzz_target_is_replayed() {
    let replayed = fuzz::TARGETS.map(|(target, _)| target.to_owned());
    assert_eq!(names(&tests::root().join("fuzz/corpus")), replayed);
    let sources = replayed.map(|target| format!("{target}.rs"));
    assert_eq!(names(&tests::root().join("fuzz/fuzz_targets")), sources);
}
