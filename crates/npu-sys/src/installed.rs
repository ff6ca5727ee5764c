//! Reads the version of an installed CANN from its installer's files.
//!
//! According to CANN's installation guide, "File Paths", versions 8.0 and 8.5, the version is a
//! line such as `version=8.1.RC1` in `<home>/<arch>-linux/ascend_toolkit_install.info` (toolkit),
//! `ascend_nnrt_install.info` in the same folder (nnrt) or `<home>/ascend_nnae_install.info`
//! (nnae). Libraries are in `<home>/lib64`, which may be a link to `<arch>-linux/lib64`, or in
//! `<home>/<package>/lib64`.

use std::env::consts::ARCH;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The version of the CANN that contains `library`; `None` without an installer's file.
pub(crate) fn version_of(library: &Path) -> Option<String> {
    // The path itself, and the target of a link.
    let real = library.canonicalize().ok();
    let places = [Some(library), real.as_deref()].into_iter().flatten();
    places.flat_map(|file| file.ancestors().skip(1).take(ABOVE)).find_map(version_in)
}

/// The version in the installer's files in `home`.
fn version_in(home: &Path) -> Option<String> {
    let folders = [home.join(format!("{ARCH}-linux")), home.to_owned()];
    let paths = folders.iter().flat_map(|folder| FILES.map(|name| folder.join(name)));
    let mut paths = paths.filter_map(|path| File::open(path).ok());
    paths.find_map(|file| {
        let mut text = Vec::new();
        file.take(MAX_BYTES).read_to_end(&mut text).ok()?;
        let text = String::from_utf8_lossy(&text).into_owned();
        let version = text.lines().find_map(|line| line.strip_prefix("version="))?.trim();
        (!version.is_empty()).then(|| version.to_owned())
    })
}

const FILES: [&str; 3] =
    ["ascend_toolkit_install.info", "ascend_nnrt_install.info", "ascend_nnae_install.info"];

/// Number of parent folders that may be the home: `lib64`, a package's or architecture's, the home.
const ABOVE: usize = 3;

/// Limit on the bytes read from a file, which usually has 300.
const MAX_BYTES: u64 = 4096;
