//! BSON as a [`Node`], without the driver: its values hold neither a name twice nor a text that is not UTF-8.
//!
//! Source: the specification of BSON 1.1, <https://bsonspec.org/spec.html>.

use std::str;

use super::node::{Collected, Leaf, LeafContent, Members, Name, Node, text_of};
use crate::BoxError;

const DOUBLE: u8 = 0x01;
const STRING: u8 = 0x02;
const DOCUMENT: u8 = 0x03;
const ARRAY: u8 = 0x04;
const BINARY: u8 = 0x05;
const OBJECT_ID: u8 = 0x07;
const NULL: u8 = 0x0A;
const REGEX: u8 = 0x0B;
const DB_POINTER: u8 = 0x0C;
const CODE: u8 = 0x0D;
const SYMBOL: u8 = 0x0E;
const CODE_WITH_SCOPE: u8 = 0x0F;
const INT32: u8 = 0x10;
const INT64: u8 = 0x12;
/// The server refuses documents that are nested more deeply than 180.
const DEEPEST: usize = 200;

pub(crate) fn read(bytes: &[u8]) -> Result<Node, BoxError> {
    let mut rest = bytes;
    let members = document(&mut rest, DEEPEST).ok_or("the stored document is not BSON")?;
    Ok(Node::Document(members))
}

fn take<'a>(bytes: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (taken, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    Some(taken)
}

/// The length at the beginning of these bytes.
fn length(bytes: &[u8]) -> Option<usize> {
    let length = i32::from_le_bytes(bytes.get(..4)?.try_into().ok()?);
    length.try_into().ok()
}

fn name<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let end = bytes.iter().position(|it| *it == 0)?;
    let name = take(bytes, end)?;
    take(bytes, 1)?;
    Some(name)
}

fn document(bytes: &mut &[u8], depth: usize) -> Option<Members> {
    let mut collected = Collected::default();
    elements(bytes, depth, |name, value| collected.push(Name::from(name), value))?;
    Some(collected.members)
}

fn elements(bytes: &mut &[u8], depth: usize, mut each: impl FnMut(&[u8], Node)) -> Option<()> {
    let mut within = take(bytes, length(bytes)?)?.get(4..)?;
    let depth = depth.checked_sub(1)?;
    loop {
        let kind = *take(&mut within, 1)?.first()?;
        if kind == 0 {
            return within.is_empty().then_some(());
        }
        let name = name(&mut within)?;
        each(name, value(kind, &mut within, depth)?);
    }
}

fn value(kind: u8, bytes: &mut &[u8], depth: usize) -> Option<Node> {
    match kind {
        DOCUMENT => return document(bytes, depth).map(Node::Document),
        ARRAY => {
            let mut all = Vec::new();
            elements(bytes, depth, |_, value| all.push(value))?;
            return Some(Node::Array(all));
        }
        _ => {}
    }
    let size = match kind {
        DOUBLE | 0x09 | 0x11 | INT64 => 8,
        STRING | CODE | SYMBOL => 4 + length(bytes)?,
        BINARY => 5 + length(bytes)?,
        0x06 | NULL | 0x7F | 0xFF => 0,
        OBJECT_ID => 12,
        0x08 => 1,
        REGEX => {
            let mut rest = *bytes;
            name(&mut rest)?;
            name(&mut rest)?;
            bytes.len() - rest.len()
        }
        DB_POINTER => 16 + length(bytes)?,
        CODE_WITH_SCOPE => length(bytes)?,
        INT32 => 4,
        0x13 => 16,
        _ => return None,
    };
    Some(Node::Leaf(leaf(kind, take(bytes, size)?)))
}

pub(crate) fn written(node: &Node) -> Vec<u8> {
    let mut bytes = Vec::new();
    write(node, &mut bytes);
    bytes
}

fn write(node: &Node, bytes: &mut Vec<u8>) {
    let begin = bytes.len();
    let element = |name: &[u8], node: &Node, bytes: &mut Vec<u8>| {
        bytes.push(kind(node));
        bytes.extend(name);
        bytes.push(0);
        write(node, bytes);
    };
    let positions: Vec<_>;
    let all: &mut dyn Iterator<Item = (&[u8], &Node)> = match node {
        Node::Leaf(leaf) => {
            bytes.extend(&leaf.bytes);
            return;
        }
        Node::Document(members) => &mut members.iter().map(|(name, it)| (name.bytes(), it)),
        Node::Array(elements) => {
            positions = (0..elements.len()).map(|at| at.to_string()).collect();
            &mut positions.iter().map(String::as_bytes).zip(elements)
        }
    };
    bytes.extend([0; 4]);
    all.for_each(|(name, node)| element(name, node, bytes));
    bytes.push(0);
    // A document beyond two gigabytes is refused long before this.
    let length = i32::try_from(bytes.len() - begin).unwrap_or(i32::MAX);
    bytes[begin..begin + 4].copy_from_slice(&length.to_le_bytes());
}

fn kind(node: &Node) -> u8 {
    match node {
        Node::Document(_) => DOCUMENT,
        Node::Array(_) => ARRAY,
        Node::Leaf(leaf) => leaf.kind,
    }
}

fn leaf(kind: u8, bytes: &[u8]) -> Leaf {
    Leaf { kind, bytes: bytes.into(), content: content(kind, bytes).unwrap_or(LeafContent::Other) }
}

fn content(kind: u8, bytes: &[u8]) -> Option<LeafContent> {
    match kind {
        STRING | BINARY | OBJECT_ID | SYMBOL => Some(LeafContent::Text),
        DOUBLE => Some(f64::from_le_bytes(bytes.try_into().ok()?).into()),
        INT32 => Some(LeafContent::Whole(i32::from_le_bytes(bytes.try_into().ok()?).into())),
        INT64 => Some(LeafContent::Whole(i64::from_le_bytes(bytes.try_into().ok()?).into())),
        NULL => Some(LeafContent::Null),
        _ => None,
    }
}

/// This document for a reader that knows only UTF-8: a text that is not UTF-8 is its bytes, and a member whose name is
/// not UTF-8 is left out; and the path of the first such text. `None` if there is no such text and no such name.
pub fn readable(bytes: &[u8]) -> Option<(Vec<u8>, String)> {
    let node = read(bytes).ok()?;
    let is_odd = |name: Option<&Name>, it: &Node| {
        name.is_some_and(|name| str::from_utf8(name.bytes()).is_err())
            || matches!(it, Node::Leaf(leaf) if is_unreadable(leaf))
    };
    let path = text_of(&node.find(&is_odd)?);
    Some((written(&read_as_bytes(node)), path))
}

fn read_as_bytes(node: Node) -> Node {
    match node {
        Node::Document(mut members) => {
            members.retain(|name, _| str::from_utf8(name.bytes()).is_ok());
            let members = members.into_iter().map(|(name, it)| (name, read_as_bytes(it)));
            Node::Document(members.collect())
        }
        Node::Array(elements) => Node::Array(elements.into_iter().map(read_as_bytes).collect()),
        Node::Leaf(odd) if is_unreadable(&odd) => {
            let length = i32::try_from(odd.bytes.len()).unwrap_or(i32::MAX).to_le_bytes();
            Node::Leaf(leaf(BINARY, &[&length[..], &[0], &odd.bytes].concat()))
        }
        leaf @ Node::Leaf(_) => leaf,
    }
}

/// True if the value is or contains a text that is not UTF-8. A text begins after its length of 4 bytes.
fn is_unreadable(Leaf { kind, bytes, .. }: &Leaf) -> bool {
    match *kind {
        STRING | CODE | SYMBOL => str::from_utf8(bytes.get(4..).unwrap_or_default()).is_err(),
        REGEX => str::from_utf8(bytes).is_err(),
        // An id of 12 bytes follows.
        DB_POINTER => {
            let text = bytes.get(4..bytes.len().saturating_sub(12));
            str::from_utf8(text.unwrap_or_default()).is_err()
        }
        // The scope is a document: only its texts are checked.
        CODE_WITH_SCOPE => {
            let end = bytes.get(4..).and_then(length).map_or(0, |length| 8 + length);
            let scope = bytes.get(end..).unwrap_or_default();
            let code = bytes.get(8..end).unwrap_or_default();
            str::from_utf8(code).is_err() || readable(scope).is_some()
        }
        _ => false,
    }
}
