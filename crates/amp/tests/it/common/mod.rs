//! Reads recorded vectors from this crate and from the folder `ORACLE_DIR`.

use std::path::{Path, PathBuf};

/// The contents of every file `name`, this crate's first. `ORACLE_DIR` may name a further folder of
/// files in the same format; it need not have all of them, but at least exist.
#[expect(clippy::print_stdout, reason = "a test says what it did not find")]
pub(crate) fn vectors(name: &str) -> Vec<Vec<u8>> {
    let mut paths = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors").join(name)];
    if let Some(folder) = std::env::var_os("ORACLE_DIR").map(PathBuf::from) {
        assert!(folder.is_dir(), "ORACLE_DIR: {} is not a folder", folder.display());
        let further = folder.join(name);
        if further.exists() {
            paths.push(further);
        } else {
            println!("ORACLE_DIR has no {name}");
        }
    }
    let read = |path: &PathBuf| {
        std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    paths.iter().map(read).collect()
}
