//! The parts of MongoDB's wire protocol that a proxy has to know.

use std::io;

use tokio::io::AsyncReadExt;
use tokio::net::tcp::OwnedReadHalf;

/// One message of the wire protocol, its header included; the first four bytes are its length.
pub(super) async fn read_frame(stream: &mut OwnedReadHalf) -> io::Result<Vec<u8>> {
    let mut frame = vec![0; 16];
    stream.read_exact(&mut frame).await?;
    let length = usize::try_from(int32(&frame, 0)).map_err(io::Error::other)?;
    frame.resize(length.max(16), 0);
    stream.read_exact(&mut frame[16..]).await?;
    Ok(frame)
}

/// The first key of the command document of an `OP_MSG`. After the header and the flags come sections:
/// the section of kind 0 is the document, and those of kind 1 begin with their length.
pub(super) fn command_name(frame: &[u8]) -> Option<String> {
    const OP_MSG: i32 = 2013;
    if int32(frame, 12) != OP_MSG {
        return None;
    }
    let mut section = frame.get(20..)?;
    while *section.first()? == 1 {
        let length = usize::try_from(int32(section, 1)).ok()?;
        section = section.get(1 + length..)?;
    }
    // The kind, the document's length and the first element's type come before its key.
    let key = section.get(6..)?.split(|&byte| byte == 0).next()?;
    String::from_utf8(key.to_vec()).ok()
}

/// Shifts the server's clock in a greeting: a date's type, its name, and its milliseconds.
pub(super) fn add_to_local_time(frame: &mut [u8], millis: i64) {
    const LOCAL_TIME: &[u8] = b"\x09localTime\0";
    let at = frame.windows(LOCAL_TIME.len()).position(|bytes| bytes == LOCAL_TIME);
    let date = at.and_then(|at| frame[at + LOCAL_TIME.len()..].first_chunk_mut());
    if let Some(date) = date {
        *date = (i64::from_le_bytes(*date) + millis).to_le_bytes();
    }
}

/// Replaces each first name by its second, which has the same length.
pub(super) fn replace_all(frame: &mut [u8], names: &[[String; 2]]) {
    for at in 0..frame.len() {
        let name = names.iter().find(|[old, _]| frame[at..].starts_with(old.as_bytes()));
        if let Some([_, new]) = name {
            frame[at..at + new.len()].copy_from_slice(new.as_bytes());
        }
    }
}

pub(super) fn int32(bytes: &[u8], at: usize) -> i32 {
    let (bytes, _) = bytes[at..].split_first_chunk().expect("a message of the wire protocol");
    i32::from_le_bytes(*bytes)
}
