//! Processes whose wall clock is wrong, by libfaketime.

use std::env;
use std::fs;
use std::path::PathBuf;

/// The library, if this machine has it: at `FAKETIME_LIB`, or where Debian's package puts it.
pub(crate) fn library() -> Option<PathBuf> {
    if let Some(named) = env::var_os("FAKETIME_LIB").filter(|path| !path.is_empty()) {
        return Some(named.into());
    }
    let found = fs::read_dir("/usr/lib").ok()?.flatten();
    let mut found = found.map(|dir| dir.path().join("faketime/libfaketimeMT.so.1"));
    found.find(|path| path.is_file())
}

/// Environment settings that set the clock this many seconds ahead, or behind. The monotonic clock is
/// not affected.
pub(crate) fn environment(seconds: i64) -> [String; 3] {
    let library = library().expect("asked for before");
    [
        format!("LD_PRELOAD={}", library.display()),
        format!("FAKETIME={seconds:+}s"),
        "DONT_FAKE_MONOTONIC=1".to_owned(),
    ]
}
